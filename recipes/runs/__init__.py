"""A run of a recipe: its folder, progress, measurements, report and upload."""
