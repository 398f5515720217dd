"""The parts of a recipe, each in a plain `Trainer`: handing over, skipped positions, teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grid import once
from hypothesis import given, settings
from hypothesis import strategies as st
from models import arguments, stock, tokens, windows
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
)

import hf_posenc
from hf_posenc import NotPatchedError, OptionError
from hf_posenc.recipes.data.collation import MixedLengths, PositionSkipping, Repetition
from hf_posenc.recipes.training import pieces
from hf_posenc.recipes.training.callbacks import Annealing, Handover
from hf_posenc.recipes.training.distillation import Distilling, Teacher, divergence, hidden_distance

few_examples = settings(max_examples=25, deadline=None, derandomize=True)


def trainer(model: Any, folder: Path, *, steps: int = 10, **changes: Any) -> Trainer:
    saving = {"save_strategy": changes.pop("save_strategy", "no"), "save_steps": 4}
    args = arguments(folder, max_steps=steps, learning_rate=changes.pop("rate", 1e-3), **saving)
    kind = changes.pop("kind", Trainer)
    return kind(model=model, args=args, train_dataset=changes.pop("data", windows("llama", 2 * steps)), **changes)


class Watch(TrainerCallback):
    """Calls a function before each optimizer step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.function(state.global_step, model)


def strengths(model: Any) -> tuple[float, float]:
    given = model.config.posenc.get("strengths", {"native": 1.0, "scheme": 1.0})
    return given["native"], given["scheme"]


def kept(scheme: str = "kerple", **options: Any) -> Any:
    torch.manual_seed(0)
    return hf_posenc.patch(stock("llama"), scheme, native="keep", gate=False, **options)


def test_handover(tmp_path: Path) -> None:
    model, seen = kept(), []
    watch = Watch(lambda step, model: seen.append(strengths(model)))
    trainer(model, tmp_path, callbacks=[Handover(0.5), watch]).train()
    scheme = [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1]
    assert [round(value, 6) for _, value in seen] == scheme
    assert [value for value, _ in seen] == pytest.approx([1 - value for value in scheme])
    assert hf_posenc.verify(model).groups[0][1] == "remove"
    assert strengths(model) == (1, 1)


def equal_when_resumed(fresh: Any, callback: Any, folder: Path, *watch: Any) -> tuple[Any, Any]:
    """Train a model, and another one from the checkpoint of step 4; return that checkpoint and the resumed model."""
    whole = fresh()
    trainer(whole, folder / "a", callbacks=[callback, *watch], save_strategy="steps").train()
    checkpoint = folder / "a" / "checkpoint-4"
    again = trainer(fresh(), folder / "b", callbacks=[callback])
    again.train(resume_from_checkpoint=str(checkpoint))
    for (name, one), other in zip(whole.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    return AutoModelForCausalLM.from_pretrained(checkpoint), again.model


@pytest.mark.parametrize("scheme", once(["fope", "xpos"]))
def test_annealing(scheme: str, tmp_path: Path) -> None:
    def fresh() -> Any:
        torch.manual_seed(0)
        options = {"clip": True} if scheme == "fope" else {}
        return hf_posenc.patch(stock("llama"), scheme, anneal=True, **options)

    def progress(model: Any) -> float:
        (value,) = {float(one.progress) for one in model.modules() if getattr(one, "anneal", False)}
        return value

    seen: list[float] = []
    watch = Watch(lambda step, model: seen.append(progress(model)))
    half, resumed = equal_when_resumed(fresh, Annealing(0.5), tmp_path, watch)
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1])
    assert progress(half) == pytest.approx(0.6)  # that of its last step
    assert progress(resumed) == 1


def test_there_must_be_something_to_bring_in(tmp_path: Path) -> None:
    for scheme, callback, error, said in (
        ("fire", Annealing, OptionError, "anneal=True: fope or xpos"),
        ("fope", Annealing, OptionError, "anneal=True: fope or xpos"),
        ("fire", Handover, OptionError, "native='keep'"),
        (None, Handover, NotPatchedError, "no patched model"),
    ):
        model = stock("llama") if scheme is None else hf_posenc.patch(stock("llama"), scheme)
        with pytest.raises(error, match=said):
            trainer(model, tmp_path, callbacks=[callback()]).train()
        for share in (0, 1.1):
            with pytest.raises(OptionError, match="0 < share <= 1"):
                callback(share)


def test_every_handover_arrives() -> None:
    for tenths in range(1, 10):
        callback = Handover(tenths / 10)
        assert [callback.progress(tenths * steps, 10 * steps) for steps in range(1, 100)] == [1.0] * 99


@given(count=st.integers(2, 40), spare=st.integers(0, 300), seed=st.integers(0, 9))
@few_examples
def test_position_skipping(count: int, spare: int, seed: int) -> None:
    skip = PositionSkipping(count + spare, seed=seed)
    ids = torch.randint(100, (3, count), generator=torch.Generator().manual_seed(seed))
    batch = skip([{"input_ids": row, "labels": row} for row in ids])
    places, steps = batch["position_ids"], batch["position_ids"].diff(dim=1)
    assert torch.equal(batch["input_ids"], ids)
    assert torch.equal(batch["labels"], ids)
    assert (places[:, 0] == 0).all()
    assert (steps >= 1).all()
    assert int(places.max()) < count + spare
    assert (steps > 1).sum(1).max() < 2
    assert torch.equal(skip.positions(ids[0]), places[0])


def test_position_skipping_reaches_all_distances() -> None:
    skip = PositionSkipping(64)
    seen = set()
    for row in tokens("llama", 400, 8):
        places = skip.positions(row)
        seen |= set((places[:, None] - places[None]).flatten().tolist())
    assert seen == set(range(-63, 64))


def test_a_share_of_the_windows_skips_positions() -> None:
    ids = tokens("llama", 200, 8)
    rows = [{"input_ids": row} for row in ids]
    some, every = (PositionSkipping(64, share=share)(rows)["position_ids"] for share in (0.5, 1.0))
    is_whole = (some == torch.arange(8)).all(1)
    assert 70 <= int(is_whole.sum()) <= 130
    assert torch.equal(some[~is_whole], every[~is_whole])


def test_a_share_of_the_windows_repeats_itself() -> None:
    ids = tokens("llama", 200, 9)
    batch = Repetition(0.4)([{"input_ids": row, "labels": row} for row in ids])
    repeats = (batch["input_ids"][:, 4:8] == ids[:, :4]).all(1)
    assert 50 <= int(repeats.sum()) <= 110
    assert torch.equal(batch["input_ids"][~repeats], ids[~repeats])
    assert torch.equal(batch["input_ids"][:, [0, 1, 2, 3, 8]], ids[:, [0, 1, 2, 3, 8]])
    assert torch.equal(batch["labels"], batch["input_ids"])
    # What stands before a text stands before a repeated one, once.
    begun = Repetition(1.0, start=int(ids[0, 0]))([{"input_ids": row, "labels": row} for row in ids])["input_ids"]
    assert torch.equal(begun, torch.cat((ids[:, :5], ids[:, 1:5]), dim=1))


def test_a_share_of_long_windows_is_read_as_short_texts() -> None:
    ids = tokens("llama", 200, 20)
    whole, short = torch.arange(20), torch.arange(20) % 8
    for share, least, most in ((0.5, 70, 130), (0.0, 0, 0), (1.0, 200, 200)):
        mixed = MixedLengths(8, share=share)
        batches = [mixed([{"input_ids": row, "labels": row} for row in rows]) for rows in ids.split(3)]
        places = torch.cat([batch["position_ids"] for batch in batches])
        is_short = (places == short).all(1)
        assert ((places == whole).all(1) != is_short).all()
        assert least <= int(is_short.sum()) <= most
        # Whatever the batches are.
        assert torch.equal(mixed([{"input_ids": row} for row in ids])["position_ids"], places)
        assert torch.equal(torch.cat([batch["labels"] for batch in batches]), ids)
    # Documents restart as they did, and windows that are no longer stay as they are.
    packed = MixedLengths(8, share=1.0)([{"input_ids": ids[0], "position_ids": torch.arange(20) % 10}])
    assert packed["position_ids"].tolist() == [[*range(8), 0, 1] * 2]
    assert "position_ids" not in MixedLengths(20, share=1.0)([{"input_ids": ids[0]}])
    # Each part begins as a text does, with a token that the part before does not predict.
    begun = MixedLengths(8, share=1.0, start=99)([{"input_ids": ids[0], "labels": ids[0]}])
    for name, first in (("input_ids", 99), ("labels", -100)):
        wanted = ids[0].tolist()
        wanted[8] = wanted[16] = first
        assert begun[name].tolist() == [wanted]


# -- distillation ------------------------------------------------------------------------------------------------------


class DistillingTrainer(Distilling, Trainer):
    """What a user writes."""


def lora(scheme: str = "kerple") -> Any:
    torch.manual_seed(0)
    base = hf_posenc.patch(stock("llama"), scheme)
    return get_peft_model(base, hf_posenc.PosencLoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def test_a_teacher_is_the_stock_model() -> None:
    ids = tokens("llama", 2, 15)
    with torch.no_grad():
        wanted = stock("llama")(ids, use_cache=False).logits
    adapted = lora().train()
    adapted.get_input_embeddings().eval()
    modes = [module.training for module in adapted.modules()]
    teachers = [
        Teacher(stock("llama")),
        Teacher.copy_of(hf_posenc.patch(stock("llama"), "fire")),
        Teacher.within(adapted),
    ]
    skipping = {"input_ids": ids, "position_ids": 3 * torch.arange(15)[None]}
    for teacher in teachers:
        assert torch.equal(teacher(skipping).logits, wanted)
    assert [module.training for module in adapted.modules()] == modes
    assert hf_posenc.verify(adapted).difference > 0
    with pytest.raises(OptionError, match=r"Teacher\.copy_of"):
        Teacher.within(stock("llama"))
    with pytest.raises(NotPatchedError, match="no patched model"):
        Teacher.within(get_peft_model(stock("llama"), LoraConfig(target_modules=["q_proj"])))


@pytest.mark.parametrize("hidden", [20.0, 0.0])
def test_distillation(hidden: float, tmp_path: Path) -> None:
    student = lora()
    teacher = Teacher.within(student)
    ids = torch.stack([window["input_ids"] for window in windows("llama", 4)])
    wanted = teacher({"input_ids": ids}, output_hidden_states=True)

    def distance() -> float:
        student.eval()
        with torch.no_grad():
            got = student(input_ids=ids, output_hidden_states=True, use_cache=False)
        far = divergence(got.logits, wanted.logits)
        return float(hidden_distance(got.hidden_states, wanted.hidden_states) if hidden else far)

    before = distance()
    given = {"rate": 2e-3, "data": 20 * windows("llama", 4), "teacher": teacher, "share": 1.0, "hidden": hidden}
    trainer(student, tmp_path, kind=DistillingTrainer, steps=40, **given).train()
    assert distance() < 0.8 * before
    again = teacher({"input_ids": ids}, output_hidden_states=True)
    assert torch.equal(again.logits, wanted.logits)


@pytest.mark.parametrize("kind", ["copy", "within"])
def test_a_teacher_reads_packed_documents_apart(kind: str) -> None:
    student = hf_posenc.patch(stock("llama"), "rope")  # an exact start, so the two are one function
    if kind == "within":
        student = get_peft_model(student, hf_posenc.PosencLoraConfig(target_modules=["q_proj"]))
    teacher = Teacher.within(student) if kind == "within" else Teacher.copy_of(student)
    packed = {
        "input_ids": tokens("llama", 2, 14),
        "position_ids": torch.tensor([[*range(5), *range(9)], [*range(8), *range(6)]]),
    }
    with torch.no_grad():
        got = student.eval()(**packed, use_cache=False).logits
    torch.testing.assert_close(teacher(packed).logits, got)
    # Within a document, jumps are left out as elsewhere.
    jumping = packed | {"position_ids": packed["position_ids"] * 3}
    torch.testing.assert_close(teacher(jumping).logits, got)


@pytest.mark.parametrize(("kind", "length"), [("copy", 7), ("within", 8), ("copy", 2)])
def test_a_teacher_reads_long_windows_in_pieces(kind: str, length: int) -> None:
    student = lora() if kind == "within" else hf_posenc.patch(stock("llama"), "kerple")
    make = Teacher.within if kind == "within" else Teacher.copy_of
    teacher, apart = make(student), make(student)
    teacher.length = length
    # The first row has padding on its left; the second two documents.
    ids, tokens_in_all = tokens("llama", 2, 29), 29
    mask = torch.ones(2, tokens_in_all, dtype=torch.long)
    mask[0, :5] = 0
    positions = torch.stack([torch.arange(tokens_in_all), torch.tensor([*range(11), *range(18)])])
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": ids}
    got = teacher(batch, output_hidden_states=True)
    assert got.logits.shape[:2] == ids.shape
    for token in range(tokens_in_all):
        # From the piece that begins furthest before it.
        step = length - length // 2
        piece = 0 if token < length else min((token - length) // step * step + step, tokens_in_all - length)
        part = {name: given[:, piece : piece + length] for name, given in batch.items()}
        wanted = apart(part, output_hidden_states=True)
        shown = mask[:, token].bool()
        torch.testing.assert_close(got.logits[shown, token], wanted.logits[shown, token - piece])
        for layer, states in enumerate(wanted.hidden_states):
            torch.testing.assert_close(got.hidden_states[layer][shown, token], states[shown, token - piece])
    assert torch.equal(teacher({"input_ids": ids[:, :length]}).logits, apart({"input_ids": ids[:, :length]}).logits)


def test_a_teacher_knows_its_length() -> None:
    assert Teacher(stock("llama")).length == stock("llama").config.max_position_embeddings
    # Whatever its config says, as those of the first ones do.
    model = stock("t5")
    model.config.n_positions = 8
    assert Teacher(model).length is None
    # What its own table of positions could not read.
    gpt2 = stock("gpt2")
    long = tokens("gpt2", 1, gpt2.config.n_positions + 9)
    assert Teacher(gpt2)({"input_ids": long}).logits.isfinite().all()
    student = get_peft_model(
        hf_posenc.patch(stock("gpt2"), "kerple"), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    )
    converted = hf_posenc.patch(stock("gpt2"), "kerple")
    for make, model in ((Teacher, gpt2), (Teacher.copy_of, converted), (Teacher.within, student)):
        assert make(model).length == gpt2.config.n_positions


def test_a_teacher_fades_and_training_alone_listens_to_it(tmp_path: Path) -> None:
    student = hf_posenc.patch(stock("llama"), "kerple")
    asked: list[int] = []

    class Counting(Teacher):
        def __call__(self, inputs: dict[str, Any], **options: Any) -> Any:
            asked.append(run.state.global_step)
            return super().__call__(inputs, **options)

    parts = {"kind": DistillingTrainer, "share": 1.0, "hidden": 1.0, "rate": 0.0}
    teacher = Counting.copy_of(student)
    run = trainer(student, tmp_path, steps=8, data=16 * windows("llama", 1), teacher=teacher, until=0.5, **parts)
    run.args.logging_steps = 1
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    # Once it has no say, it is not asked either.
    assert set(asked) == {0, 1, 2, 3}
    batch = {"input_ids": windows("llama", 1)[0]["input_ids"][None]}
    with torch.no_grad():
        text = student.eval()(**batch, labels=batch["input_ids"], output_hidden_states=True)
    assert run.evaluate(windows("llama", 1))["eval_loss"] == pytest.approx(text.loss.item())
    wanted = teacher(batch, output_hidden_states=True)
    far = divergence(text.logits, wanted.logits)
    apart = hidden_distance(text.hidden_states, wanted.hidden_states)
    for step, loss in enumerate(losses):
        left = max(0.0, 1 - step / 4)
        assert loss == pytest.approx(float((1 - left) * text.loss + left * far + left * apart), rel=1e-4), step
    for wrong in ({"until": 1.5}, {"share": 2.0}, {"hidden": -1.0}):
        with pytest.raises(OptionError, match="0 <= share <= 1, hidden >= 0 and 0 <= until <= 1"):
            DistillingTrainer(teacher=None, **wrong)


@pytest.mark.parametrize("architecture", once(["llama", "t5"]))
def test_accumulated_batches_teach_as_one_does(architecture: str, tmp_path: Path) -> None:
    weights, logs = [], []
    for accumulation in (1, 2, 4):
        student = hf_posenc.patch(stock(architecture), "alibi")
        size = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        run = DistillingTrainer(
            model=student,
            args=arguments(tmp_path, max_steps=1, max_grad_norm=0.0, logging_steps=1, **size),
            train_dataset=windows(architecture, 4),
            optimizers=(torch.optim.SGD(student.parameters(), lr=1.0), None),
            teacher=Teacher.copy_of(student),
            share=0.5,
            hidden=1.0,
        )
        run.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]))
        logs.append(run.state.log_history[0])
    for found, log in zip(weights[1:], logs[1:], strict=True):
        # Float32 sums in another order, times a learning rate of 1.
        torch.testing.assert_close(found, weights[0], atol=2e-3, rtol=1e-3)
        assert log["loss"] == pytest.approx(logs[0]["loss"], rel=1e-4)
        assert log["text_loss"] == pytest.approx(logs[0]["text_loss"], rel=1e-4)
    ids = torch.stack([window["input_ids"] for window in windows(architecture, 4)])
    with torch.no_grad():
        text = hf_posenc.patch(stock(architecture), "alibi")(input_ids=ids, labels=ids).loss
    assert logs[0]["text_loss"] == pytest.approx(float(text), rel=1e-4)


def test_padding_teaches_an_encoder_decoder_nothing(tmp_path: Path) -> None:
    """Two sources of different lengths in one batch, and two texts to write, teach what each teaches alone."""

    def loss(rows: list[tuple[int, int]], hidden: float) -> tuple[float, int]:
        student = hf_posenc.patch(stock("t5", dropout_rate=0.0), "alibi")
        run = trainer(
            student, tmp_path, kind=DistillingTrainer, teacher=Teacher.copy_of(student), share=1.0, hidden=hidden
        )
        source, written = torch.full((len(rows), 9), 1), torch.full((len(rows), 12), -100)
        for row, (read, write) in enumerate(rows):
            source[row, :read] = tokens("t5", 1, read, seed=read)[0]
            written[row, :write] = tokens("t5", 1, write, seed=write)[0]
        mask = (torch.arange(9)[None] < torch.tensor([[read] for read, _ in rows])).long()
        batch = {"input_ids": source, "attention_mask": mask, "labels": written}
        with torch.no_grad():
            return float(run.compute_loss(student.train(), batch)), sum(write for _, write in rows)

    (one, first), (two, second), (both, _) = (loss(rows, 0.0) for rows in ([(9, 12)], [(6, 5)], [(9, 12), (6, 5)]))
    assert both == pytest.approx((first * one + second * two) / (first + second), rel=1e-4)
    assert one != pytest.approx(two, rel=1e-2)
    assert loss([(9, 12), (6, 5)], 1.0)[0] > both


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_divergence_goes_through_a_few_tokens_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_NUMBERS_AT_ONCE", 100)  # Three tokens of 31 numbers.
    logits, wanted = torch.randn(2, 7, 31).to(dtype).requires_grad_(), torch.randn(2, 7, 31).to(dtype)
    keep = torch.rand(2, 7) > 0.3
    got, target = (x.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1) for x in (logits, wanted))
    whole = F.kl_div(got, target, reduction="none", log_target=True).sum(-1)[keep].mean()
    found = divergence(logits, wanted, keep)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (found, whole)))


def test_padding_teaches_nothing() -> None:
    got, wanted = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    full = divergence(torch.cat([got[0, :2], got[1]])[None], torch.cat([wanted[0, :2], wanted[1]])[None])
    torch.testing.assert_close(divergence(got, wanted, keep), full)
    torch.testing.assert_close(divergence(got, wanted, keep[:, :3]), divergence(got, wanted))
    for hidden in (got, wanted):
        assert float(hidden_distance((hidden,), (hidden,), keep)) == 0
