"""Encoders of sound at a shorter length: what the table becomes, what is learned and written, and what is refused."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import DIRECTORIES
from test_added import SOUND
from torch.nn import functional as F
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.patches.added import shortened, sound_encoder
from hf_posenc.recipes.training.sounds import Sounds, shorter, sound_files

# Seconds that are padded to, and positions and samples of one.
OWN, SHORT, POSITIONS, RATE = 3, 1, 50, 16_000


def make() -> Any:
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(WhisperConfig(**SOUND | {"max_source_positions": OWN * POSITIONS})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its feature extractor; not to be changed."""
    found = tmp_path_factory.mktemp("original")
    model = make()
    model.generation_config.suppress_tokens = [7]
    model.save_pretrained(found)
    WhisperFeatureExtractor(feature_size=SOUND["num_mel_bins"], chunk_length=OWN).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 20 noises with a melody, some of them longer than the shorter length, some in a folder inside."""
    folder, draw = tmp_path_factory.mktemp("sounds"), np.random.default_rng(0)
    (folder / "inside").mkdir()
    for index in range(20):
        time = np.arange(int(RATE * draw.uniform(0.4, 1.4))) / RATE
        wanted = 0.3 * np.sin(2 * np.pi * draw.uniform(100, 3000) * time) + 0.1 * draw.standard_normal(len(time))
        write(folder / ("inside" if index % 2 else ".") / f"{index:02}.wav", wanted)
    (folder / "notes.txt").write_text("no sound")
    return folder


def write(file: Path, samples: np.ndarray[Any, Any], *, rate: int = RATE, channels: int = 1) -> None:
    with wave.open(str(file), "wb") as opened:
        opened.setparams((channels, 2, rate, 0, "NONE", ""))
        opened.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["shorten", *map(str, arguments)])


def test_what_a_shorter_sound_is_compared_with(folder: Path, sounds: Path) -> None:
    """What the original's decoder makes of its own words after the same sound, cut, with silence behind it."""
    original = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    own = AutoFeatureExtractor.from_pretrained(folder)
    short, files = shorter(own, SHORT), sound_files(sounds, RATE)
    samples, cut = Sounds(files, (own, short), original), shortened(original, POSITIONS)
    assert (len(samples), samples.sizes, samples.positions) == (20, (SHORT,), POSITIONS)
    # The table is cut, and the rest is as it was.
    weights, left = original.state_dict(), cut.state_dict()
    different = [name for name, weight in left.items() if not torch.equal(weight, weights[name])]
    assert different == ["model.encoder.embed_positions.weight"]
    assert torch.equal(left[different[0]], weights[different[0]][:POSITIONS])
    chosen, cosines, means, equal = list(range(6)), [], [], 0
    with torch.no_grad():
        for file in files[:6]:
            with wave.open(str(file)) as opened:
                heard = np.frombuffer(opened.readframes(RATE), "<i2").astype(np.float32) / 32768
            whole, part = (
                each(heard, sampling_rate=RATE, return_tensors="pt")["input_features"] for each in (own, short)
            )
            row = original.generate(whole, do_sample=False)[0].tolist()
            ids = torch.tensor([[SOUND["decoder_start_token_id"], *row]])
            one, other = (
                model(features, decoder_input_ids=ids, output_hidden_states=True)
                for model, features in ((original, whole), (cut, part))
            )
            last = [each.decoder_hidden_states[-1] for each in (one, other)]
            cosines.append(F.cosine_similarity(*last, dim=-1).mean())
            means.append(last[0].mean(1)[0])
            equal += torch.equal(*(each.logits.argmax(-1) for each in (one, other)))
        wanted = samples.wanted(original, chosen, SHORT)
        found = samples.read(cut, samples.inputs(chosen, SHORT))
        measures = samples.other_measures(lambda inputs: samples.read(cut, inputs), chosen, SHORT)
    assert len({tuple(row) for row in samples._ids(chosen)}) > 1
    torch.testing.assert_close(wanted[0], torch.stack(means))
    torch.testing.assert_close(samples.cosines(found, wanted)["states"].float(), torch.stack(cosines))
    assert measures == {"transcripts": equal / 6}


@pytest.mark.parametrize("bfloat16", [False, True])
def test_the_command_writes_a_checkpoint_for_shorter_sounds(
    folder: Path, sounds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bfloat16: bool
) -> None:
    monkeypatch.setattr("hf_posenc.recipes.processes.bfloat16_pays", lambda width: bfloat16)
    out = tmp_path / "shorter"
    asked = ("--sounds", sounds, "--seconds", SHORT, "--steps", 40, "--learning-rate", 3e-3, "--json")
    done = run(folder, out, *asked)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)
    assert row["seconds"] == SHORT
    assert row["states, before"] == pytest.approx(row["states, original"])
    assert row["states, before"] < row["states, after"] < 1
    assert {"transcripts, original", "transcripts, after"} < row.keys()
    # Loaded again it is a stock model that reads the shorter length, and its states are nearer to the original's.
    model, extractor = AutoModelForSpeechSeq2Seq.from_pretrained(out), AutoFeatureExtractor.from_pretrained(out)
    assert type(model) is WhisperForConditionalGeneration
    assert (model.config.max_source_positions, extractor.chunk_length) == (POSITIONS, SHORT)
    assert model.generation_config.suppress_tokens == [7]
    original = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    own = AutoFeatureExtractor.from_pretrained(folder)
    samples, chosen = Sounds(sound_files(sounds, RATE)[-5:], (own, extractor), original), list(range(5))
    with torch.no_grad():
        found = samples.read(model.eval(), samples.inputs(chosen, SHORT))
        after = samples.cosines(found, samples.wanted(original, chosen, SHORT))["states"].mean()
    # In bfloat16, the command's own measure rounds to 8 bits.
    assert float(after) == pytest.approx(row["states, after"], abs=3e-3 if bfloat16 else 1e-5)
    assert torch.equal(model.get_output_embeddings().weight, original.get_output_embeddings().weight)


def test_what_is_refused(folder: Path, sounds: Path, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("empty", "broken", "stereo", "converted")}
    for place in places.values():
        place.mkdir()
    (places["broken"] / "a.wav").write_bytes(b"no sound")
    write(places["stereo"] / "a.wav", np.zeros(100), rate=44_100, channels=2)
    hf_posenc.patch(make(), "t5", native="keep").save_pretrained(places["converted"])
    out = tmp_path / "out"
    for model, heard, seconds, expected in (
        (folder, places["empty"], SHORT, "There are no sounds in"),
        (folder, places["broken"], SHORT, "a.wav cannot be read"),
        (
            folder,
            places["stereo"],
            SHORT,
            "2 channels of 16 bits, 44100 times a second; expected one",
        ),
        (folder, sounds, OWN, "expected 1 to 2"),
        (DIRECTORIES["llama"], sounds, SHORT, "'llama' do not read sound of one length"),
        (places["converted"], sounds, SHORT, "is converted already"),
    ):
        done = run(model, out, "--sounds", heard, "--seconds", seconds)
        assert done.exit_code, heard
        assert expected in " ".join(done.output.split()), (expected, done.output)
        assert not out.exists()


def test_the_encoder_is_found_in_a_converted_model() -> None:
    model = make()
    encoder = model.get_encoder()
    assert sound_encoder(hf_posenc.patch(model, "t5", native="keep")) is encoder
