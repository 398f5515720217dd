"""Training of a converted model: losses, callbacks, starts and the trainer."""
