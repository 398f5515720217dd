"""The names by which PEFT finds projections: on a converted model they lead where they lead on the stock one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
from models import ARCHITECTURES, TINY, stacks_for, stock
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D
from variants import VARIANTS, identify

import hf_posenc

LAYERS = nn.Linear | Conv1D | nn.Embedding
ANY = [*ARCHITECTURES, *TINY]
ENCODERS = ("bert", "roberta", "modernbert", "vit")
# Without encoders for schemes that are causal by definition, and a model whose rotation one option does not suit.
CASES = [
    (scheme, options, architecture)
    for scheme, info in hf_posenc.schemes().items()
    for options in VARIANTS.get(scheme, [{}])
    for architecture in ANY
    if "bidirectional" in info.directions or architecture not in ENCODERS
    if not (architecture == "smollm3" and "max_length" in options)
]


@functools.cache
def ways(architecture: str) -> list[tuple[dict[str, Any], set[str]]]:
    """Return ways to name projections and embeddings, as those of any family, and what they adapt in a stock model."""
    named = {name for names in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.values() for name in names}
    for other in ANY:
        named |= {name.rpartition(".")[2] for name, x in stock(other).named_modules() if isinstance(x, LAYERS)}
    model = stock(architecture)
    containers = {name.rpartition(".")[2] for name, x in model.named_modules() if not isinstance(x, LAYERS)}
    names = sorted(name for name in named - containers if name.isidentifier())
    # The defaults of a family are among the names.
    found: list[dict[str, Any]] = [{"target_modules": names}, {"target_modules": "all-linear"}]
    found += [{"target_modules": [], "target_parameters": [f"{name}.weight" for name in names]}]
    return [(way, adapted(model, way)) for way in found]


def adapted(model: Any, way: dict[str, Any]) -> set[str]:
    """Return the names of the layers that LoRA adapts."""
    inside = get_peft_model(copy.deepcopy(model), LoraConfig(r=1, **way)).get_base_model()
    return {name for name, module in inside.named_modules() if isinstance(module, BaseTunerLayer)}


@pytest.mark.grid  # LoRA on every layer takes a third of a second
@pytest.mark.filterwarnings("ignore::UserWarning")  # of all layers that no adapter should be on
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("scheme", "options", "architecture"), CASES, ids=identify)
def test_names_of_projections_lead_into_no_scheme(scheme: str, options: dict[str, Any], architecture: str) -> None:
    model = hf_posenc.patch(stock(architecture), scheme, **stacks_for(architecture, scheme), **options)
    for way, wanted in ways(architecture):
        assert adapted(model, way) == wanted, way
