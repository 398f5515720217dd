"""Text for training and measuring: sources, tokenisation, windows and batches."""
