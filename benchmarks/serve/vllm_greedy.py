"""Compare greedy tokens of vLLM and of transformers for converted checkpoints, on a CPU.

A scheme that vLLM does not serve has to be refused. Environment: vllm.txt, and this package, installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# One process; the numbers of this machine's memory nodes say nothing in a container.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm import LLM, SamplingParams

import hf_posenc

LENGTHS = (5, 70, 3, 33, 130)
CONFIG = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
# Besides each scheme as it is: kept encodings, learned slopes, layers that stay as they were.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "alibi, learned": ("alibi", {"learned_slopes": True, "shared": False}),
    "alibi, gated, native kept": ("alibi", {"native": "keep", "gate": True}),
    "alibi, layers 0 and 2": ("alibi", {"layers": [0, 2]}),
    "nope, layer 1": ("nope", {"layers": [1]}),
    "attention_sinks, native kept": ("attention_sinks", {"native": "keep"}),
    "rope+attention_sinks": ("rope+attention_sinks", {}),
    "log_temperature, native kept": ("log_temperature", {"native": "keep"}),
    "gated_output, native kept": ("gated_output", {"native": "keep"}),
}


def converted(path: str | None, scheme: str, options: dict[str, Any]) -> Any:
    """Return a converted model, with weights far enough from their start that the scheme matters."""
    torch.manual_seed(1)
    if path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))
        for parameter in model.model.layers.parameters():
            parameter.data *= 3 if parameter.ndim > 1 else 1
    hf_posenc.patch(model.eval(), scheme, **options)
    for name, parameter in model.named_parameters():
        if "hf_posenc" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def compare(folder: Path, model: Any, tokens: int) -> str:
    """Return what vLLM does with a model: how many prompts it continues as transformers does, or its refusal."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    model.save_pretrained(folder)
    given = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = [model.generate(torch.tensor([p]), **given)[0, len(p) :].tolist() for p in prompts]
    try:
        server = LLM(
            str(folder), dtype="float32", max_model_len=512, skip_tokenizer_init=True, enforce_eager=True,
            enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=4,
        )  # fmt: skip
    except Exception as error:
        words = next((line for line in str(error).splitlines() if "cannot serve this model" in line), None)
        if words is None:
            raise
        return f"refused: {words.strip()}"
    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    # The second time, prompts are in the cache.
    rounds = [server.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False) for _ in range(2)]
    equal = [sum(list(x.outputs[0].token_ids) == row for x, row in zip(found, wanted, strict=True)) for found in rounds]
    return (
        f"{equal[0]} and {equal[1]} of {len(prompts)} equal, {len({t for row in wanted for t in row})} different tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schemes", nargs="*", help="names of schemes or variants; all by default")
    parser.add_argument("--model", help="folder of a Llama; a small random one by default")
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    names = given.schemes or [*hf_posenc.schemes(), *VARIANTS]
    if len(names) > 1:
        # vLLM changes classes of models for its first model in a process.
        same = [f"--tokens={given.tokens}", *([f"--model={given.model}"] if given.model else [])]
        for name in names:
            subprocess.run([sys.executable, __file__, name, *same], check=True)
        return
    [name] = names
    scheme, options = VARIANTS.get(name, (name, {}))
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), converted(given.model, scheme, options), given.tokens)
    sys.stdout.write(f"{name}: {found}\n")


if __name__ == "__main__":
    main()
