"""What several schemes share: base classes, layers, buckets and rotations by generators. No module here is a scheme."""
