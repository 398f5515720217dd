"""Keys ahead of a query in causal stacks, which the mask of a prefix shows: every scheme, executor and kind of mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grid import once
from models import SAME, moved, stock, tokens
from torch import Tensor
from variants import identify, variants

import hf_posenc
from hf_posenc import DirectionError, Geometry, Scheme, build
from hf_posenc.attention import Call, executors, run
from hf_posenc.attention.mask import from_tensor
from hf_posenc.operands import Positions, Tokens

HEADS, GROUPS, WIDTH, HIDDEN = 4, 2, 8, 12
LENGTH, PREFIX = 40, 26

every_variant = pytest.mark.parametrize(("name", "direction", "options"), variants("causal"), ids=identify)


def make(name: str, options: dict[str, Any], *, causal: bool = True) -> Scheme:
    torch.manual_seed(0)
    shape = {"heads": HEADS, "kv_heads": GROUPS, "head_dim": WIDTH, "hidden_size": HIDDEN, "max_positions": 64}
    return moved(build(name, Geometry(causal=causal, **shape), **options), 0.3)


def prefix(length: int = LENGTH, size: int = PREFIX) -> Tensor:
    """Who may see whom, bool `[Q, K]`: the tokens of a prefix see each other, later ones what is before them."""
    slots = torch.arange(length)
    return (slots <= slots[:, None]) | (slots < size)


def attended(scheme: Scheme, mask: Tensor, executor: str | None, places: Tensor | None = None) -> dict[str, Tensor]:
    """Return the output of attention under a 4-D mask, and all gradients."""
    generator = torch.Generator().manual_seed(1)
    size = {"q": (2, HEADS, LENGTH, WIDTH), "k": (2, GROUPS, LENGTH, WIDTH), "v": (2, GROUPS, LENGTH, WIDTH)}
    given = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in size.items()}
    hidden = torch.randn(2, LENGTH, HIDDEN, generator=generator)
    places = torch.arange(LENGTH)[None] if places is None else places
    tokens = Tokens(positions=Positions(places, places), hidden=hidden, common=scheme.common)
    call = Call.of(scheme, tokens, **given, mask=from_tensor(mask, "all", (2, HEADS, LENGTH, LENGTH)), reach=LENGTH)
    output = scheme.finish(run(call, executor=executor)[0], hidden)
    scheme.zero_grad()
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    learned = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in scheme.named_parameters()}
    return {"output": output.detach(), **{name: x.grad for name, x in given.items()}, **learned}


def mirror(causal: Scheme, encoder: Scheme) -> None:
    """Give the encoder's form the parameters of the causal one; keys ahead get those of the same distance behind."""
    given = dict(causal.named_parameters())
    for name, there in encoder.named_parameters():
        here = given[name.replace("pos_emb_right", "pos_emb")]
        if "rel_embeddings" in name:
            half = len(here) // 2
            made = torch.cat((here[-1:], here[half + 1 :].flip(0), here[half:]))
        elif there.shape == here.shape:
            made = here
        else:
            made = (
                torch.cat((here[:, 1:].flip(1), here), dim=1)
                if name.endswith(("r", "offsets")) or name == "proj"
                else torch.cat((here, here))
            )
        there.data.copy_(made)


def defined_for_both(name: str) -> bool:
    return "bidirectional" in hf_posenc.schemes()[name].directions


@every_variant
def test_a_key_ahead_counts_as_in_the_form_for_encoders(name: str, direction: str, options: dict[str, Any]) -> None:
    causal = make(name, options)
    everything = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    if not defined_for_both(name):
        with pytest.raises(DirectionError, match=f"keys at later positions; {name} is defined"):
            attended(causal, everything, None)
        return
    buckets = {"num_buckets": 2 * options.get("num_buckets", 32)} if name == "t5" else {}
    encoder = make(name, {**options, **buckets}, causal=False)
    mirror(causal, encoder)
    got, want = (attended(scheme, everything, "dense")["output"] for scheme in (causal, encoder))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@every_variant
@pytest.mark.parametrize("kind", once(["bool", "float", "positions that restart"]))
def test_every_executor_equals_the_reference(name: str, direction: str, options: dict[str, Any], kind: str) -> None:
    scheme, mask, places = make(name, options), prefix()[None, None], None
    if kind == "float":
        mask = torch.where(mask, 0.0, -torch.inf)
    if kind == "positions that restart":
        mask, places = torch.ones_like(mask).tril(), torch.arange(LENGTH)[None] % 16
    if not defined_for_both(name):
        with pytest.raises(DirectionError):
            attended(scheme, mask, None, places)
        return
    want = attended(scheme, mask, "dense", places)
    for executor in executors(scheme)[1:]:
        got = attended(scheme, mask, executor, places)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, msg=lambda text, e=executor: f"{e}: {text}")


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
def test_a_prefix_in_a_model(scheme: str) -> None:
    """In one forward, and in two with a cache; masks of booleans and of numbers."""
    model = moved(hf_posenc.patch(stock("llama"), scheme, native="keep"), 0.3)
    ids, seen = tokens("llama", 2, LENGTH), prefix().expand(2, 1, -1, -1)
    if not defined_for_both(scheme):
        for mask in (seen, torch.where(seen, 0.0, torch.finfo(torch.float32).min)):
            with pytest.raises(DirectionError), torch.no_grad():
                model(ids, attention_mask=mask)
        return
    with torch.no_grad():
        want = model(ids, attention_mask=seen, use_cache=False).logits
        added = model(ids, attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min), use_cache=False)
        begun = model(ids[:, :PREFIX], attention_mask=seen[:, :, :PREFIX, :PREFIX], use_cache=True)
        rest = model(ids[:, PREFIX:], past_key_values=begun.past_key_values, use_cache=True).logits
        model.set_attn_implementation("eager")
        dense = model(ids, attention_mask=seen, use_cache=False).logits
    for got in (added.logits, torch.cat((begun.logits, rest), dim=1), dense):
        torch.testing.assert_close(got, want, **SAME)


@pytest.mark.parametrize("scheme", ["t5", "t5_clipped"])
def test_a_model_with_a_table_of_its_own_keeps_its_rule(scheme: str) -> None:
    """A decoder of T5 has keys ahead of the query at distance 0."""
    model = stock("t5")
    ids, seen = tokens("t5", 2, LENGTH), prefix().expand(2, 1, -1, -1)
    call = {"input_ids": ids, "decoder_input_ids": ids, "decoder_attention_mask": seen, "use_cache": False}
    with torch.no_grad():
        want = model(**call).logits
        got = hf_posenc.patch(model, scheme)(**call).logits
    torch.testing.assert_close(got, want, **SAME)


@pytest.mark.parametrize("scheme", ["alibi", "xpos"])
def test_a_prefix_by_type_of_layer(scheme: str) -> None:
    """Models of images and text hand one mask for each type of layer to their decoder, as for images in a prompt."""
    model = moved(hf_posenc.patch(stock("gemma3"), scheme, native="keep"), 0.3)
    ids, seen = tokens("gemma3", 2, 7), prefix(7, 5).expand(2, 1, -1, -1)
    masks = {"sliding_attention": seen, "full_attention": seen}
    with torch.no_grad():
        if scheme == "xpos":
            with pytest.raises(DirectionError):
                model(ids, attention_mask=masks)
            return
        got, want = (model(ids, attention_mask=mask, use_cache=False).logits for mask in (masks, seen))
    torch.testing.assert_close(got, want, **SAME)
