"""The schema of a recipe: its keys, and the checks across keys."""
