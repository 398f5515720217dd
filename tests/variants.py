"""Every scheme with every set of options that leads through other code."""

from __future__ import annotations

from typing import Any

from hf_posenc import schemes

# Some options only make the defaults matter at small sizes.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "comrope_ap": [{}, {"init": "official", "block_size": 2}],
    "comrope_ld": [{}, {"init": "official", "axes": 2}],
    "fope": [{}, {"sigma": 0.3, "clip": True, "max_length": 64}],
    "liere": [{}, {"init": "official", "block_size": 4}, {"axes": 2}],
    "rope2d": [{}, {"kind": "axial"}, {"axes": 1, "layout": "half"}],
    "xpos": [{}, {"layout": "half", "scale_base": 20.0, "block_length": 3}],
    "alibi": [{}, {"learned_slopes": True, "gate": True}],
    "cape": [
        {},
        {"base": "alibi", "form": "add", "init": "zero"},
        {"base": "fire", "form": "add_residual", "mlp_width": 5},
        {"base": "nope"},
    ],
    "cope": [
        {},
        {"npos": 3, "scale_position_logits": False},
        {"npos": 4, "separate_keys": True},
        {"npos": 4, "value_gates": True},
    ],
    "disentangled": [
        {"max_distance": 60},
        {"max_distance": 4, "p2c": False, "scale": "deberta"},
        {"max_distance": 20, "buckets": 8, "normalize": True, "scale": "deberta"},
        {"max_distance": 5, "c2p": False, "init": "zero"},
    ],
    "fire": [{}, {"threshold": 6.0, "width": 5, "normalizer": "query", "gate": True}],
    "fox": [
        {},
        {"forget_gate": "bias_only", "init": "official"},
        {"forget_gate": "fixed", "decay_time_max": 9.0},
        {"init": "horizon", "horizon": 5.0},
    ],
    "fox_pro": [
        {},
        {"share_qk_norm": True, "v_shift": False, "output_norm": False, "gate_activation": "silu"},
        {"output_gate": False, "qk_norm": False, "k_shift": False},
    ],
    "grape_a": [{}, {"gate": True}],
    "inkling": [{"extent": 20, "init": "normal"}, {"rank": 3, "extent": 4}],
    "kerple": [{}, {"kernel": "power"}, {"kernel": "power", "weighted": True, "gate": True}],
    "log_temperature": [{}, {"temperature": "ssmax"}, {"temperature": "llama4", "floor": 5}],
    "path": [{}, {"gate": True, "kernel": 1, "rank": 3}],
    "pope": [{}, {"theta": 100.0, "init": "uniform", "gate": True}],
    "repo": [{}, {"init": "official", "width": 3}],
    "rope": [{}, {"layout": "interleaved", "rotary_dim": 4, "theta": 100.0, "gate": True}, {"proportion": 0.5}],
    "sandwich": [{}, {"dim": 10, "freq_start": 1, "gate": True}],
    "selective_rope": [{}, {"init": "official", "kernel": 1, "rank": 3}],
    "shaw": [{"max_distance": 3}, {"values": False, "init": "normal"}],
    "sinusoidal": [{}, {"layout": "concat", "freq": "t2t", "scale": 0.3, "gate": True}],
    "stick_breaking": [
        {},
        {"attend_current": True, "start_bias": True},
        {"remainder": "self"},
        {"remainder": "head_bias"},
    ],
    "tape": [{}, {"theta": 100.0, "gate": True}],
    "t5": [{}, {"num_buckets": 8, "max_distance": 20, "gate": True}],
    "t5_clipped": [{"init": "normal"}, {"init": "normal", "max_distance": 5, "gate": True}],
    "transformer_xl": [{}, {"untie": True, "clamp_len": 4, "init": "zero"}],
}


def identify(value: object) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}={given}" for key, given in value.items()) or "default"
    return str(value).removeprefix("torch.")


def variants(direction: str | None = None) -> list[tuple[str, str, dict[str, Any]]]:
    """Every scheme in every direction that it declares, with every set of options: (name, direction, options)."""
    return [
        (name, way, options)
        for name, info in schemes().items()
        for way in info.directions
        for options in VARIANTS.get(name, [{}])
        if direction in (None, way)
    ]
