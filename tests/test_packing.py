"""Packed samples: every way to say where they begin, with padding, in every architecture and with every scheme."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from grid import once
from models import DECODERS, ENCODERS, SAME, auto, inputs, logits, moved, stacks_for, stock, tokens
from torch import Tensor
from transformers import DataCollatorWithFlattening

import hf_posenc
from hf_posenc.errors import CacheError, PositionError

LENGTHS = (9, 1, 5, 13)
TOTAL = sum(LENGTHS)
NUMBERS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)
# Padding before, between and behind the samples; its positions are those of `generate`.
PADDED = [0, 0, *[1] * LENGTHS[0], 0, *[1] * (TOTAL - LENGTHS[0]), 0]

FORMS: dict[str, dict[str, Any]] = {
    "mask": {"attention_mask": NUMBERS + 1},
    "lengths": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 13, "max_length_k": 13},
    "numbers": {"seq_idx": NUMBERS.int()},
    "positions and a mask": {"position_ids": PLACES, "attention_mask": torch.ones_like(PLACES)},
    "all": {"attention_mask": NUMBERS + 4, "position_ids": PLACES, "cu_seq_lens_q": ENDS, "seq_idx": NUMBERS},
}


def patched(architecture: str, scheme: str) -> Any:
    torch.manual_seed(0)
    return moved(hf_posenc.patch(stock(architecture), scheme, **stacks_for(architecture, scheme)), 0.3)


def first_row(architecture: str) -> int:
    """The number of the first position in `position_ids`."""
    return 2 if architecture == "roberta" else 0


def forms(architecture: str) -> dict[str, dict[str, Any]]:
    if auto(architecture).__name__ != "AutoModelForSeq2SeqLM":
        shift = first_row(architecture)
        return {
            form: {name: x + shift if name == "position_ids" else x for name, x in call.items()}
            for form, call in FORMS.items()
        }
    both = {form: FORMS[form] for form in ("mask", "positions and a mask")}
    return {form: call | {f"decoder_{name}": x for name, x in call.items()} for form, call in both.items()}


def alone(model: Any, architecture: str, ids: Tensor) -> Tensor:
    """Return the logits of the samples, each in a row of its own."""
    return torch.cat(
        [logits(model, architecture, part, torch.ones_like(part)) for part in ids.split(LENGTHS, 1)], dim=1
    )


@torch.no_grad()
def compare(architecture: str, scheme: str, names: Iterable[str] = FORMS) -> None:
    model, ids = patched(architecture, scheme), tokens(architecture, 1, TOTAL)
    want, call = alone(model, architecture, ids), inputs(architecture, ids)
    call |= {"decoder_input_ids": ids} if "decoder_input_ids" in call else {}
    chosen = {form: given for form, given in forms(architecture).items() if form in names}
    for form, given in chosen.items():
        for cached in ({}, {"use_cache": True}) if architecture in (*DECODERS, "gpt2") else ({},):
            got = model(**call, **given, **cached).logits
            torch.testing.assert_close(got, want, **SAME, msg=lambda text, form=form: f"{form}: {text}")


@torch.no_grad()
def compare_padded(architecture: str, scheme: str) -> None:
    """A row with samples and padding, next to a row with one sample: by positions, and by numbers in the mask."""
    model, ids = patched(architecture, scheme), tokens(architecture, 1, TOTAL)
    real = torch.tensor(PADDED) != 0
    row, places, numbers = torch.full((len(real),), 1), torch.full((len(real),), 1), torch.zeros(len(real)).long()
    row[real], places[real], numbers[real] = ids[0], PLACES[0], NUMBERS[0] + 1
    other = tokens(architecture, 1, len(real), seed=5)
    mask, shift = torch.stack((real.long(), torch.ones(len(real)).long())), first_row(architecture)
    positions = torch.stack((places, torch.arange(len(real)))) + shift
    call = inputs(architecture, torch.cat((row[None], other)))
    call |= {"decoder_input_ids": call["input_ids"]} if "decoder_input_ids" in call else {}
    pair = {"attention_mask": mask, "position_ids": positions}, {"attention_mask": mask * numbers.clamp_min(1)}
    pair[1]["attention_mask"][1] = 3
    want, second = alone(model, architecture, ids), logits(model, architecture, other, torch.ones_like(other))
    for given in pair:
        if "decoder_input_ids" in call:
            given |= {f"decoder_{name}": value for name, value in given.items()}
        got = model(**call, **given).logits
        assert got.isfinite().all()
        torch.testing.assert_close(got[:1, real], want, **SAME)
        torch.testing.assert_close(got[1:], second, **SAME)


@pytest.mark.parametrize("architecture", ["gpt2", *DECODERS, *ENCODERS])
@pytest.mark.parametrize("check", once([compare_padded, compare]))
def test_packed_samples_are_as_alone_in_every_architecture(check: Any, architecture: str) -> None:
    check(architecture, "fire")


@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
@pytest.mark.parametrize("padded", once([False, True]))
def test_packed_samples_are_as_alone_with_every_scheme(padded: bool, scheme: str) -> None:
    """All forms are the same to a scheme: the test above has the others."""
    if padded:
        compare_padded("llama", scheme)
    else:
        compare("llama", scheme, ["mask"])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", once(["llama", "gpt2", "gemma3"]))
@torch.no_grad()
def test_what_the_collator_of_transformers_returns(architecture: str, backend: str) -> None:
    model, ids = patched(architecture, "fox_pro"), tokens(architecture, 1, TOTAL)
    model.set_attn_implementation(backend)
    samples = [{"input_ids": part[0].tolist()} for part in ids.split(LENGTHS, 1)]
    want = alone(model, architecture, ids)
    for positions in (True, False):
        collate = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True, return_seq_idx=True, return_position_ids=positions
        )
        batch = collate(samples, return_tensors="pt")
        batch.pop("labels")
        torch.testing.assert_close(model(**batch).logits, want, **SAME)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "positions that go on": {"position_ids": torch.arange(TOTAL)[None], "attention_mask": NUMBERS + 1},
    "positions that restart elsewhere": {"position_ids": torch.arange(TOTAL)[None] % 7, "seq_idx": NUMBERS},
    "other lengths": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": torch.tensor([0, 4, TOTAL])},
    "other numbers": {"cu_seq_lens_q": ENDS, "seq_idx": torch.zeros_like(NUMBERS)},
    "lengths of another row": {"cu_seq_lens_q": ENDS + 1},
    "lengths that fall": {"cu_seq_lens_q": torch.tensor([0, 20, 9, TOTAL])},
    "numbers that come back": {"attention_mask": 1 + torch.arange(TOTAL)[None] // 7 % 2},
    "numbers of a wrong dtype": {"seq_idx": NUMBERS.float()},
    "numbers of another shape": {"seq_idx": NUMBERS[:, 1:]},
}


@pytest.mark.parametrize("case", list(CONTRADICTIONS))
@pytest.mark.parametrize("architecture", once(["llama", "gpt2", "bert"]))
def test_contradictions_are_refused(architecture: str, case: str) -> None:
    with pytest.raises(PositionError):
        patched(architecture, "alibi")(tokens(architecture, 1, TOTAL), **CONTRADICTIONS[case])


@pytest.mark.parametrize(
    ("architecture", "name"), [("t5", "cu_seq_lens_q"), ("t5", "seq_idx"), ("vit", "cu_seq_lens_k")]
)
def test_lengths_are_refused_where_they_say_too_little(architecture: str, name: str) -> None:
    model = patched(architecture, "alibi")
    with pytest.raises(PositionError, match=name):
        model(**inputs(architecture, tokens(architecture, 1, TOTAL)), **{name: ENDS})


@torch.no_grad()
def test_packed_samples_do_not_go_on() -> None:
    model, ids = patched("llama", "alibi"), tokens("llama", 1, TOTAL)
    one = {"attention_mask": torch.full_like(ids, 2)}  # one sample, whatever its number
    begun = model(ids, **one, use_cache=True)
    grown = {"attention_mask": torch.full((1, TOTAL + 1), 2), "past_key_values": begun.past_key_values}
    assert model(ids[:, :1], **grown).logits.isfinite().all()
    grown["attention_mask"] = torch.cat((grown["attention_mask"], grown["attention_mask"][:, :1] + 1), dim=1)
    with pytest.raises(CacheError, match="Use a row for each sample"):
        model(ids[:, :1], **grown)
    for given in ({"attention_mask": NUMBERS + 1}, {"position_ids": PLACES, "attention_mask": torch.ones_like(ids)}):
        for kind in ("dynamic", "static"):
            with pytest.raises((CacheError, PositionError)):
                model.generate(ids, **given, max_new_tokens=2, min_new_tokens=2, cache_implementation=kind)
