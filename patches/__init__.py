"""One file per architecture: where the seams of a scheme sit in its forward."""
