"""Functions of tensors, with a backward pass of their own where that is faster, each in one file with its naive form."""
