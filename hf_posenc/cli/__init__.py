"""The command line: `hf-posenc --help`.

Heavy modules are imported inside the commands, so that help and the tables of schemes and recipes appear at once.
"""

from hf_posenc.cli import convert, evaluate, train
from hf_posenc.cli.application import app

__all__ = ["app", "convert", "evaluate", "train"]
