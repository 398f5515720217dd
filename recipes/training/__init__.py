"""Training of converted models: losses, callbacks, fits and the trainer."""
