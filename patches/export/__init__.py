"""Converted models as ordinary checkpoints, where a stock model computes the same function."""
