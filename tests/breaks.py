"""Breaks the product in many places, one at a time, and says which of them the default tests catch.

    python tests/breaks.py              # all of them; what an earlier run caught is not run again
    python tests/breaks.py fire cache   # only those that hold one of these words in what they say
    python tests/breaks.py --check      # only look whether the text of each is there

It works on a copy of the tree. Verdicts are kept in build/breaks.json, so a run can be stopped at any time; --again
forgets them. A break whose text is gone from the product is a failure: give it a new anchor in BREAKS.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "breaks.json"
PRODUCT = ("hf_posenc", "patches", "recipes")


@dataclass(frozen=True)
class Break:
    """One mistake in the product.

    Attributes:
        what: The mistake, in a line.
        tests: Test files that are likely to catch it, without `test_` and `.py`; `file:word` runs only matching tests.
        old: Text that is there once, in any file of the product.
        new: Text that replaces it.
        near: End of the path of its file, if several files have such a text.
    """

    what: str
    tests: str
    old: str
    new: str
    near: str = ".py"


# fmt: off
BREAKS = [
    # Schemes.
    Break("ALiBi has no other slopes where heads are no power of two", "goldens",
        "-4.0 * (head + 1)",
        "-8.0 * (head + 1)"),
    Break("FIRE's ratio has no normaliser beyond the threshold", "goldens",
        "torch.maximum(last, self._limit().to(c))) + _EPSILON",
        "self._limit().to(c)) + _EPSILON"),
    Break("FIRE's network starts silent at init='paper'", "contracts:neutral",
        'if self.init == "zero":',
        'if self.init == "paper":', near="schemes/fire.py"),
    Break("sandwich counts frequencies from another start", "goldens",
        "+ self.freq_start",
        "+ 1 - self.freq_start"),
    Break("sinusoidal positions have sine and cosine the other way round", "goldens",
        "(angles.sin(), angles.cos())",
        "(angles.cos(), angles.sin())"),
    Break("T5's table does not start as the model's own", "documentation:start_exact",
        'init = "native" if fits else "normal"',
        'init = "normal"', near="schemes/t5.py"),
    Break("the gate of rotary schemes forgets the scaling of the model", "rotary_family families",
        "return self.length if self.gate_weight is None else 1.0 + (self.length - 1.0)",
        "return 1.0 if self.gate_weight is None else 1.0 + 0 * (self.length - 1.0)"),
    Break("a rotary scheme turns queries by the positions of keys", "contracts:elsewhere",
        "if self.query is self.key and",
        "if self.query.shape == self.key.shape and"),
    Break("Shaw's values are not added", "content_relative attend",
        "return output + (sums @ self.rel_v.to(sums)).to(output.dtype)",
        "return output + 0 * (sums @ self.rel_v.to(sums)).to(output.dtype)"),
    Break("xPos fades by the wrong share of channels", "rotary_family goldens",
        "self.rotary_dim + 0.4).div(1.4)",
        "self.rotary_dim + 0.4).div(1.3)"),
    Break("the gates of FoX count padding", "contracts:padding",
        "log_gates = log_gates.masked_fill(~tokens.real[..., None], 0)",
        "log_gates = log_gates * 1"),
    Break("the sums of FoX start again in each chunk", "fox",
        "return sums if before is None else sums + before",
        "return sums"),
    Break("CoPE with separate keys caches none of their bytes, so plans say", "walks cache",
        "* element if self.separate_keys else 0",
        "* 0 if self.separate_keys else 0"),
    Break("CoPE counts gates of keys that are ahead as behind", "walks",
        "return (block.distance() < 0)[:, None]",
        "return (block.distance() <= 0)[:, None]"),
    Break("stick-breaking takes from the query's own key", "walks",
        "distance >= 0 if self.attend_current else distance > 0",
        "distance >= 0"),
    Break("TaPE's states do not move with the feed-forward", "tape",
        "return carried + update.transpose(-1, -2)",
        "return carried + 0 * update.transpose(-1, -2)"),
    # Operations.
    Break("hidden keys get a finite weight", "attend contracts",
        "logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)",
        "logits = logits.masked_fill(~keep, -10.0)"),
    Break("sums by distance lose what is at the first vector and beyond", "attend content_relative",
        ".scatter_add(-1, index, weights)",
        ".scatter_add(-1, index, weights * (index > 0))"),
    Break("counts are interpolated from the wrong side", "walks",
        "+ (place - below) * steps.gather(-1, index)",
        "- (place - below) * steps.gather(-1, index)"),
    # Executors.
    Break("blocks forget the last keys of a block", "attend",
        "self.mask.keys_needed(stop, self.keys)",
        "max(1, self.mask.keys_needed(stop, self.keys) - 1)", near="attention/call.py"),
    Break("blocks drop gradients that come from other blocks", "attend",
        "part is not None:\n                total[place] += part",
        "part is not None:\n                total[place] = part.to(total)", near="attention/blocks.py"),
    # Caches and generation.
    Break("a crop leaves the state of the tokens", "cache",
        "left = max(0, tensor.shape[_TOKENS] - abs(tokens_to_remove))",
        "left = tensor.shape[_TOKENS]"),
    Break("beams do not take their state with them", "matrix:beam_search",
        "self._map_state(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))",
        "pass"),
    Break("a static cache writes state one slot too early", "matrix:caches_equal",
        "+ self.cumulative_length - new.shape[_TOKENS]",
        "+ self.cumulative_length - new.shape[_TOKENS] - (self.cumulative_length > new.shape[_TOKENS])"),
    Break("a cache that a stock model has filled is taken", "bad_input",
        "    held = int(layer.get_seq_length())\n",
        "    held = 0\n"),
    Break("a window shows one key too many", "families:starts_exact",
        "distance.abs() < self.window",
        "distance.abs() <= self.window"),
    Break("a layer without rotation is given one", "families:starts_exact",
        "    if not rotates:\n",
        "    if False:\n"),
    # Surgery.
    Break("a failure leaves the containers of modules as they were changed", "bad_input",
        "copy.copy(value) if isinstance(value, (dict, list, set)) else value",
        "value"),
    Break("a table that was frozen by patch stays so after unpatch", "matrix:unpatch_is_bit_identical",
        "parameter.requires_grad_(True)\n                frozen",
        "parameter.requires_grad_(False)\n                frozen"),
    Break("an attention with a forward of its own is patched", "bad_input",
        'if "forward" in vars(target) and',
        'if "forward" in vars(target) and False and'),
    Break("every:2 begins with the first layer", "cli:plan_reads",
        "everything[int(step) - 1 :: int(step)]",
        "everything[:: int(step)]"),
    Break("a blend keeps queries as they were", "strength",
        "q=self._between(q, there.q)",
        "q=q"),
    # Checkpoints and adapters.
    Break("a record of a newer format is read", "checkpoints_checked:newer",
        "version > FORMAT_VERSION",
        "version > FORMAT_VERSION + 1000"),
    Break("the digest of a record leaves out its groups", "checkpoints_checked",
        '("plugin_version", "modules", "digest")}',
        '("plugin_version", "digest", "groups")}'),
    Break("the original value behind the lock is lost", "matrix:save_and_load checkpoints_on_disk",
        '"locked": data.get(field, getattr(self, field))}',
        '"locked": None}'),
    Break("an adapter of other schemes is loaded", "adapters",
        'for key in ("groups", "strengths")):',
        'for key in ("strengths",)):'),
    # Recipes and evaluation.
    Break("scheme parameters decay", "recipes:group_of_their_own",
        '"lr": scheme_learning_rate, "weight_decay": 0.0}',
        '"lr": scheme_learning_rate, "weight_decay": weight_decay}'),
    Break("the handover stops before the end", "levers",
        "native=1 - progress, scheme=progress)",
        "native=1 - progress, scheme=progress / 2)"),
    Break("packed documents learn the first token of the next", "data",
        "token if position else -100 for token, position in",
        "token for token, position in"),
    Break("the interval of a mean is that of one sample", "measurements evaluation",
        "half = _student(count - 1) * float(values.std()) / math.sqrt(count)",
        "half = _student(count - 1) * float(values.std())"),
    Break("keys stand among the other tokens, too", "evaluation",
        "keys, others = symbols[:_PAIRS], symbols[_PAIRS:]",
        "keys, others = symbols[:_PAIRS], symbols"),
]
# fmt: on


def main() -> int:
    """Run the breaks that were asked for; return 1 if one was missed or is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="words of the descriptions; all breaks without any")
    parser.add_argument("--check", action="store_true", help="only look whether the text of each break is there")
    parser.add_argument("--again", action="store_true", help="forget earlier verdicts")
    given = parser.parse_args()
    wanted = [one for one in BREAKS if not given.words or any(word in one.what for word in given.words)]
    verdicts = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() and not given.again else {}
    with tempfile.TemporaryDirectory(prefix="hf-posenc-breaks-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for number, one in enumerate(wanted, start=1):
            began = time.monotonic()
            key = repr(astuple(one))
            if given.check or not verdicts.get(key, "").startswith("caught"):
                verdicts[key] = _verdict(one, copy, run=not given.check)
            took = time.monotonic() - began
            print(f"{number:2}/{len(wanted)} {one.what}: {verdicts[key]} ({took:.0f} s)", flush=True)  # noqa: T201
            if not given.check:
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    kinds = [verdicts[repr(astuple(one))].split()[0] for one in wanted]
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))))  # noqa: T201
    return int("MISSED" in kinds or "GONE" in kinds)


def _verdict(one: Break, copy: Path, *, run: bool) -> str:
    files = [path for folder in PRODUCT for path in (copy / folder).rglob("*.py") if str(path).endswith(one.near)]
    texts = {path: text for path in files if one.old in (text := path.read_text(encoding="utf-8"))}
    count = sum(text.count(one.old) for text in texts.values())
    if count != 1:
        return f"GONE (its text is there {count} times)"
    tests = [name.partition(":")[::2] for name in one.tests.split()]
    if lost := [file for file, _ in tests if not (copy / "tests" / f"test_{file}.py").exists()]:
        return f"GONE (there is no test_{lost[0]}.py)"
    if not run:
        return "there"
    ((path, text),) = texts.items()
    path.write_text(text.replace(one.old, one.new), encoding="utf-8")
    try:
        for file, word in tests:
            found = _failure(copy, [f"tests/test_{file}.py", *(["-k", word] if word else [])])
            if found:
                return found
    finally:
        path.write_text(text, encoding="utf-8")
    return "MISSED"


def _failure(copy: Path, arguments: list[str]) -> str:
    """Return which test fails first, or an empty string."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode > 2 or not lines:
        return f"GONE (no such test: {' '.join(arguments)})"
    return f"caught by {lines[0].split(' - ')[0].split(maxsplit=1)[1].removeprefix('tests/')}"


if __name__ == "__main__":
    sys.exit(main())
