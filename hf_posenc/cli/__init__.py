"""The command line: `hf-posenc --help`.

Heavy modules are imported inside the commands, so that help and the tables of schemes and recipes appear at once.
"""

from __future__ import annotations

from hf_posenc.cli import compare as comparing
from hf_posenc.cli import convert as conversion
from hf_posenc.cli import evaluate as evaluating
from hf_posenc.cli import export as exporting
from hf_posenc.cli import plot as plotting
from hf_posenc.cli import train as training
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
