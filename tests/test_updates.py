"""Weights that a program changes between its steps: they are blamed, and not the code with them."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture.weight_samples import sampled
from llmdebug_nb.core.updates import SAMPLES, UPDATED, History, Sample, sample_of
from models import llama

UPDATED_OTHERWISE = "weight changed otherwise"
ROWS, WIDTH, CLASSES = 8, 16, 5


class Net(nn.Module):
    """Tokens -> an embedding, two blocks with a norm, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def optimizer_of(kind, parameters, rate=0.1, **options):
    cls = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[kind]
    return cls(parameters, lr=rate if kind == "SGD" else rate / 10, **options)


def steps(model, name, path, kind="SGD", act=None, mode="module", count=4, **options):
    """Record a training. ``act(model, optimizer, step)``: is called before each update."""
    optimizer = optimizer_of(kind, model.parameters(), **options)
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 50, (count, ROWS)), torch.randint(0, CLASSES, (count, ROWS))
    with ld.dump(model, name=name, path=path, mode=mode, tokens="all") as run:
        for step in range(count):
            nn.functional.cross_entropy(model(tokens[step]), labels[step]).backward()
            if act is not None:
                act(model, optimizer, step)
            optimizer.step()
            optimizer.zero_grad()
    return run


def net():
    torch.manual_seed(0)
    return Net()


def against(golden, mine):
    return ld.compare(golden, mine, progress=False)


def clip(model, optimizer, step):
    if step == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def decay(model, optimizer, step):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.9)  # which counts no version


def keep_one(model, optimizer, step):
    model.layers[1][1].weight.grad = None


def schedule(model, optimizer, step):
    optimizer.param_groups[0]["lr"] *= 1 - 0.3 * (step == 1)


WRONG = {
    "rate": {"rate": 0.2}, "momentum": {"momentum": 0.9}, "clipped": {"act": clip},
    "decay": {"act": decay}, "a weight that is left out": {"act": keep_one},
    "schedule": {"act": schedule}, "optimizer": {"kind": "Adam"},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["module", "module+aten"])
@pytest.mark.parametrize("name", WRONG)
def test_weights_that_were_changed_otherwise_are_blamed(name, mode, tmp_path):
    golden = steps(net(), "golden", tmp_path, mode=mode)
    report = against(golden, steps(net(), "mine", tmp_path, mode=mode, **WRONG[name]))
    first = report.findings[0]
    assert (report.verdict, first.cause) == ("diverged", UPDATED_OTHERWISE)
    assert first.step == (2 if name in ("clipped", "schedule", "momentum") else 1)
    assert f"its weights were changed before step {first.step}, not as in golden" in first.evidence
    assert sum(each.cause == UPDATED_OTHERWISE for each in report.findings) == 1
    assert "optimizer" in str(report)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_code_that_is_wrong_from_a_later_step_on_is_blamed(kind, tmp_path):
    def plant(model, optimizer, step):
        if step == 1:
            model.layers[1][2].forward = nn.functional.softsign

    golden = steps(net(), "golden", tmp_path, kind)
    report = against(golden, steps(net(), "mine", tmp_path, kind, plant))
    first = report.findings[0]
    assert (first.path, first.step) == ("layers.1.2", 2)
    assert first.cause != UPDATED_OTHERWISE


def test_a_wrong_gradient_is_blamed_first_and_named_where_weights_follow_from_it(tmp_path):
    def plant(model, optimizer, step):
        model.layers[0][1].weight.grad *= 2  # behind the backward pass: a hook that is not seen

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    golden = steps(net(), "golden", tmp_path)
    model = net()
    model.layers[0][2].register_forward_hook(lambda module, args, y: Doubled.apply(y))
    report = against(golden, steps(model, "mine", tmp_path))
    assert report.findings[0].step == 0
    assert report.findings[0].cause != UPDATED_OTHERWISE
    later = [each for each in report.findings if each.cause == UPDATED_OTHERWISE]
    assert all("so does the gradient of" in each.evidence for each in later)
    assert all("in step 0" in each.evidence for each in later)
    hidden = against(golden, steps(net(), "hidden", tmp_path, act=plant))
    assert hidden.findings[0].cause == UPDATED_OTHERWISE  # no gradient that was recorded differs
    assert "gradient of" not in hidden.findings[0].evidence


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str
)
def test_right_optimizers_that_round_otherwise_are_no_difference(options, tmp_path):
    golden = steps(net(), "golden", tmp_path, "AdamW")
    report = against(golden, steps(net(), "mine", tmp_path, "AdamW", **options))
    assert report.verdict in ("match", "within_noise")
    assert not report.findings


def test_samples_are_recorded_at_first_and_after_each_change(tmp_path):
    def act(model, optimizer, step):
        for parameter in model.parameters():
            if step == 1:
                parameter.grad = None

    model = net()
    run = steps(model, "run", tmp_path, act=act)
    history = History(run.index, 0)
    assert set(history.samples) == {
        tuple(name.rsplit(".", 1)) for name, _ in model.named_parameters()
    }
    head = [step for (_, step), _ in history.samples["head", "weight"]]
    assert head == [0, 1, 3]  # nothing changed after the second pass
    assert history.changed(("head", "weight"), (0, 1))
    assert not history.changed(("head", "weight"), (0, 0))
    assert history.at(("head", "weight"), (0, 2)) == history.at(("head", "weight"), (0, 1))
    assert history.at(("nothing", "weight"), (0, 2)) == []
    kind = history.samples["head", "weight"][0][1].kind
    assert kind == f"float32 [{CLASSES}, {WIDTH}]"


def test_inference_without_gradients_records_none(tmp_path):
    model = net()
    with torch.no_grad(), ld.dump(model, name="run", path=tmp_path) as run:
        model(torch.arange(4))
    assert run.index.scalars(role=UPDATED) == []


def test_an_evaluation_after_training_knows_the_changed_weights(tmp_path):
    def run(name, rate):
        model = net()
        optimizer = optimizer_of("SGD", model.parameters(), rate)
        with ld.dump(model, name=name, path=tmp_path, tokens="all") as run:
            model(torch.arange(4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.arange(4))
        return run

    report = against(run("golden", 0.1), run("mine", 0.2))
    assert report.findings[0].cause == UPDATED_OTHERWISE


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(3, 4).to_sparse(), torch.ones(3, 4, device="meta"), torch.ones(3, 4).t(),
        torch.ones(0), torch.arange(4), torch.ones(4, dtype=torch.complex64),
    ],
    ids=["sparse", "meta", "strided", "empty", "integers", "complex"],
)  # fmt: skip
def test_weights_that_can_not_be_sampled_are_not_followed(weight, tmp_path):
    model = nn.Linear(4, 4)
    model.register_buffer("odd", weight)
    model.forward = lambda x: nn.functional.linear(x, model.weight, model.bias)
    with ld.dump(model, name="run", path=tmp_path) as run:
        model(torch.ones(2, 4)).sum().backward()
    assert {row.slot for row in run.index.scalars(role=UPDATED)} == {"weight", "bias"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32])
@given(numel=st.integers(1, 4000))
def test_a_sample_is_spread_over_the_weight(dtype, numel):
    (found,) = sampled([torch.arange(numel).to(dtype)])
    taken = sample_of("", found.hex()).values
    assert 1 <= len(taken) <= SAMPLES
    assert taken[0] == 0
    assert list(taken) == sorted(set(taken)) or dtype in (torch.bfloat16, torch.float16)
    assert numel < SAMPLES or (len(taken) > SAMPLES / 2 and taken[-1] >= 0.9 * numel - SAMPLES)


@given(st.lists(st.floats(width=32), min_size=1, max_size=SAMPLES))
def test_a_sample_is_read_as_it_was_written(values):
    (written,) = sampled([torch.tensor(values)])
    read = sample_of("float32", written.hex())
    assert str(read) == str(Sample("float32", tuple(values)))


@given(st.none() | st.text() | st.binary().map(bytes.hex))
def test_any_other_text_is_no_sample_or_one_of_few_numbers(text):
    read = sample_of("", text)
    assert read is None or 0 < len(read.values) <= SAMPLES


def test_the_error_of_samples_is_that_of_their_values():
    a, b = Sample("float32 [2]", (3.0, 4.0)), Sample("float32 [2]", (3.0, 4.5))
    assert a.error(b) == pytest.approx(0.5 / 5)  # relative L2
    assert a.error(a) == 0.0
    assert a.error(Sample("float32 [3]", (3.0, 4.0))) is None
    assert Sample("float32 [1]", (0.0,)).error(Sample("float32 [1]", (1.0,))) == math.inf
    assert a.error(Sample("float32 [2]", (math.nan, 4.0))) == math.inf
    assert Sample("float32 [7, 12, 3]", (1.0,)).longest == 12


def test_a_language_model_with_another_rate_is_blamed_on_its_optimizer(tmp_path):
    def run(name, rate):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        tokens = torch.arange(12)[None]
        with ld.dump(model, name=name, path=tmp_path) as run:
            for _ in range(3):
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return run

    report = against(run("golden", 1e-3), run("mine", 2e-3))
    (only,) = report.findings
    assert (only.cause, only.step) == (UPDATED_OTHERWISE, 1)
