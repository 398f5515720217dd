"""Pictures of what the schemes of a model have learned: of any patched model, and of stock ones.

for name, figure in hf_posenc.recipes.plots.figures(model, tokenizer).items():
    figure.savefig(f"{name}.png")
"""

from __future__ import annotations

from hf_posenc.recipes.plots.figures import PROMPT, figures, kinds

__all__ = ["PROMPT", "figures", "kinds"]
