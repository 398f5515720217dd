"""Breaks the product in many places, one at a time, and says which of them the default tests catch.

    python tests/breaks.py              # the test files that are likely to catch a break
    python tests/breaks.py --all        # the whole default run, where those files miss it
    python tests/breaks.py fire cache   # only breaks whose file or description holds one of these words

Works on a copy of the tree in a temporary folder. A break whose text is gone from the product is reported as such: write
it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SECONDS = 1800


@dataclass(frozen=True)
class Break:
    """One mistake in the product.

    Attributes:
        what: The mistake, in a line.
        file: The file, from the root of the tree.
        old: Text that is there once.
        new: Text that replaces it.
        tests: Names of the test files that are likely to catch it, without `test_` and `.py`; perhaps one test of a file.
    """

    what: str
    file: str
    old: str
    new: str
    tests: str


S, A, P, R = "hf_posenc/schemes/", "hf_posenc/attention/", "patches/", "recipes/"
BREAKS = [
    # Schemes.
    Break("ALiBi has no other slopes where heads are no power of two", S + "alibi.py", "-4.0 * (head + 1)", "-8.0 * (head + 1)", "goldens"),
    Break("FIRE's ratio has no normaliser beyond the threshold", S + "fire.py", "torch.maximum(last, self._limit().to(c))) + _EPSILON", "self._limit().to(c)) + _EPSILON", "goldens"),
    Break("FIRE's network starts silent at init='paper'", S + "fire.py", 'if self.init == "zero":', 'if self.init == "paper":', "options"),
    Break("sandwich counts frequencies from another start", S + "sandwich.py", "+ self.freq_start", "+ 1 - self.freq_start", "goldens"),
    Break("sinusoidal positions have sine and cosine the other way round", S + "sinusoidal.py", "(angles.sin(), angles.cos())", "(angles.cos(), angles.sin())", "goldens"),
    Break("T5's table does not start as the model's own", S + "t5.py", 'init = "native" if fits else "normal"', 'init = "normal"', "documentation::test_concepts_name_the_schemes_that_start_exact"),
    Break("the gate of rotary schemes forgets the scaling of the model", S + "families/rotary.py", "whole = self.geometry.rotary_scaling if self._native else 1.0", "whole = 1.0", "rotary_family heads"),
    Break("a rotary scheme turns queries by the positions of keys", S + "families/rotary.py", "same = positions.query is positions.key", "same = positions.query.shape == positions.key.shape", "attend"),
    Break("Shaw's values are not added", S + "shaw.py", "return output + (sums @ self.rel_v.to(sums)).to(output.dtype)", "return output + 0 * (sums @ self.rel_v.to(sums)).to(output.dtype)", "content_relative attend"),
    Break("xPos fades by the wrong share of channels", S + "xpos.py", "self.rotary_dim + 0.4).div(1.4)", "self.rotary_dim + 0.4).div(1.3)", "rotary_family goldens"),
    Break("the gates of FoX count padding", S + "fox.py", "log_gates = log_gates.masked_fill(~tokens.real[..., None], 0)", "log_gates = log_gates * 1", "matrix::test_left_padding_equals_each_row_alone"),
    Break("the sums of FoX start again in each chunk", S + "fox.py", "return sums if before is None else sums + before", "return sums", "fox"),
    Break("CoPE with separate keys caches none of their bytes, so plans say", S + "cope.py", "* element if self.separate_keys else 0), 0", "* 0 if self.separate_keys else 0), 0", "cope cache_bytes"),
    Break("CoPE counts gates of keys that are ahead as behind", S + "cope.py", "return (block.distance() < 0)[:, None]", "return (block.distance() <= 0)[:, None]", "cope"),
    Break("stick-breaking takes from the query's own key", S + "stick_breaking.py", "distance >= 0 if self.attend_current else distance > 0", "distance >= 0", "stick_breaking"),
    Break("TaPE's states do not move with the feed-forward", S + "tape.py", "return carried + update.transpose(-1, -2)", "return carried + 0 * update.transpose(-1, -2)", "tape"),
    # Operations.
    Break("hidden keys get a finite weight", "hf_posenc/ops/masking.py", "torch.finfo(logits.dtype).min).softmax(dim=-1)", "-10.0).softmax(dim=-1)", "hiding attend"),
    Break("the fast softmax leaves a gradient at hidden keys", "hf_posenc/ops/masking.py", "return fill_hidden_(of_logits, keep, 0.0), None", "return of_logits + 1e-3 * (~keep), None", "hiding"),
    Break("sums by distance lose what is beyond the first vector", "hf_posenc/ops/skew.py", "sums[..., 0] += values[..., :begin].sum(-1)", "sums[..., 0] += 0 * values[..., :begin].sum(-1)", "attend engine content_relative"),
    Break("counts are interpolated from the wrong side", "hf_posenc/ops/counting.py", "+ (place - below) * steps.gather(-1, index)", "- (place - below) * steps.gather(-1, index)", "cope"),
    Break("the gradient of counts runs from the wrong end", "hf_posenc/ops/counting.py", "(grad * slope).cumsum_(-1), gates", "(grad * slope).flip(-1).cumsum(-1).flip(-1), gates", "cope attend"),
    # Executors.
    Break("blocks forget the last keys of a block", A + "blocks.py", "yield Rows(start, stop, self.call.mask.keys_needed(stop, self.call.keys))", "yield Rows(start, stop, max(1, self.call.mask.keys_needed(stop, self.call.keys) - 1))", "attend"),
    Break("blocks drop gradients that come from other blocks", A + "blocks.py", "total[places[index] if index < len(places) else ...] += part", "total[places[index] if index < len(places) else ...] = part.to(total)", "attend"),
    # Caches and generation.
    Break("a crop leaves the state of the tokens", P + "cache.py", "self.token_state = {name: tensor[:, :length] for", "self.token_state = {name: tensor for", "cache"),
    Break("beams do not take their state with them", P + "cache.py", "self._map_state(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))", "pass", "matrix::test_beam_search"),
    Break("a static cache writes state one slot too early", P + "cache.py", "+ self.cumulative_length - new.shape[_TOKENS]", "+ self.cumulative_length - new.shape[_TOKENS] - (self.cumulative_length > new.shape[_TOKENS])", "matrix::test_static_cache_equals_growing_cache"),
    Break("a cache that a stock model has filled is taken", P + "cache.py", "    held = int(layer.get_seq_length())\n", "    held = 0\n", "bad_input"),
    # Surgery.
    Break("undo takes its steps back in the order they were made", P + "surgery.py", "self._steps.pop()()", "self._steps.pop(0)()", "bad_input"),
    Break("a table that was frozen by patch stays so after unpatch", P + "surgery.py", "undo.set_grad(parameters[index], True)", "undo.set_grad(parameters[index], False)", "matrix::test_unpatch_is_bit_identical_also_after_training"),
    Break("an attention with a forward of its own is patched", P + "surgery.py", 'if "forward" in vars(target) and', 'if "forward" in vars(target) and False and', "bad_input"),
    Break("every:2 begins with the first layer", P + "selection.py", "everything[int(step) - 1 :: int(step)]", "everything[:: int(step)]", "exporting cli"),
    Break("a blend keeps queries as they were", P + "blend.py", "q=self._between(q, there.q)", "q=q", "strength"),
    # Checkpoints and adapters.
    Break("a record of a newer format is read", P + "record.py", "version > FORMAT_VERSION", "version > FORMAT_VERSION + 1000", "bad_input"),
    Break("the digest of a record leaves out its groups", P + "record.py", '("plugin_version", "digest")}', '("plugin_version", "digest", "groups")}', "checkpoints_checked"),
    Break("the original value behind the lock is lost", P + "checkpoint.py", '"locked": data.get(field, getattr(self, field))}', '"locked": None}', "matrix::test_save_and_load_are_bit_equal checkpoints_on_disk"),
    Break("an adapter of other schemes is loaded", P + "adapters.py", 'if wanted["groups"] != own["groups"]:', 'if len(wanted["groups"]) != len(own["groups"]):', "adapters"),
    # Recipes and evaluation.
    Break("scheme parameters decay", R + "training/callbacks.py", '"lr": scheme_learning_rate, "weight_decay": 0.0}', '"lr": scheme_learning_rate, "weight_decay": weight_decay}', "levers recipes run"),
    Break("the handover stops before the end", R + "training/callbacks.py", "native=1 - gone, scheme=gone)", "native=1 - gone, scheme=gone / 2)", "levers"),
    Break("packed documents learn the first token of the next", R + "data/windows.py", "for label in (-100, *ids[1:])]", "for label in ids]", "data"),
    Break("the interval of a mean is that of one sample", R + "evaluation/intervals.py", "half = _student(count - 1) * float(values.std()) / math.sqrt(count)", "half = _student(count - 1) * float(values.std())", "measurements evaluating evaluation"),
    Break("needles stand at the other end of the text", R + "evaluation/needle.py", "place = round(depth * room)", "place = round((1 - depth) * room)", "evaluating"),
]  # fmt: skip


def main() -> int:
    """Run the breaks that were asked for; return 1 if one was missed or is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of the file or description; all breaks without any")
    parser.add_argument("--all", action="store_true", help="run everything where the likely files miss a break")
    parser.add_argument("--check", action="store_true", help="only say whether the text of each break is there")
    given = parser.parse_args()
    wanted = [x for x in BREAKS if not given.words or any(word in f"{x.file} {x.what}" for word in given.words)]
    found = []
    with tempfile.TemporaryDirectory(prefix="hf-posenc-breaks-") as folder:
        copy = Path(folder) / "tree"
        left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "*.egg-info")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        for number, one in enumerate(wanted, start=1):
            began = time.monotonic()
            verdict = _verdict(one, copy, whole=given.all, check=given.check)
            found.append(verdict.split()[0])
            print(f"{number:2}/{len(wanted)} {verdict} ({time.monotonic() - began:.0f} s): {one.what}", flush=True)  # noqa: T201
    kinds = ("caught", "missed", "gone", "there")
    print(", ".join(f"{found.count(kind)} {kind}" for kind in kinds if kind in found))  # noqa: T201
    return int("missed" in found or "gone" in found)


def _verdict(one: Break, copy: Path, *, whole: bool, check: bool) -> str:
    path = copy / one.file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(one.old) != 1:
        return f"gone from {one.file}"
    if check:
        return "there"
    path.write_text(text.replace(one.old, one.new), encoding="utf-8")
    try:
        names = [name.partition("::") for name in one.tests.split()]
        likely = [f"tests/test_{file}.py{mark}{test}" for file, mark, test in names]
        for files in [[file] for file in likely] + [["tests"]] * whole:
            caught = _failure(copy, files)
            if caught:
                return f"caught by {caught}"
    finally:
        path.write_text(text, encoding="utf-8")
    return "missed"


def _failure(copy: Path, files: list[str]) -> str:
    """Return the first test that fails, or an empty string."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0].split(" - ")[0].split(maxsplit=1)[1].removeprefix("tests/") if lines else done.stdout[-300:]


if __name__ == "__main__":
    sys.exit(main())
