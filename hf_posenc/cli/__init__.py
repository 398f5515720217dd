"""The command line: `hf-posenc --help`.

Everything heavy is imported inside the commands, so that help and the tables of schemes and recipes come at once.
"""

from __future__ import annotations

from hf_posenc.cli import comparing, conversion, evaluating, exporting, plotting, training
from hf_posenc.cli.application import app
from hf_posenc.cli.directories import OutputError, whole_directory

__all__ = [
    "OutputError",
    "app",
    "comparing",
    "conversion",
    "evaluating",
    "exporting",
    "plotting",
    "training",
    "whole_directory",
]
