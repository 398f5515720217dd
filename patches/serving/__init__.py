"""Converted models in servers, which keep keys and values in pages of their own and attend over these themselves."""
