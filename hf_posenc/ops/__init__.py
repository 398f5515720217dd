"""Functions of tensors with a backward pass of their own, each in one file with its naive form."""
