"""Adapting a converted checkpoint: text, short adaptation, evaluation, pictures."""
