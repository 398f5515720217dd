"""`python -m hf_posenc`: the command line."""

from hf_posenc.cli import app

app()
