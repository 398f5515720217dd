"""Schema of recipes: keys, types and checks across keys."""
