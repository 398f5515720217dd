"""All that touches a transformers model: one file per architecture, patching, checkpoints, adapters, export."""
