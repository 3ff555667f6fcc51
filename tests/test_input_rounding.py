"""llama.cpp rounds what it multiplies to 8 bits: that is noise, and bugs beside it are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fake_ggml
import llmdebug_nb as ld
from fake_ggml import F32, Q8_0, Fake, installed
from llmdebug_nb.comparison import other_tokens
from llmdebug_nb.comparison.input_rounding import Factor
from llmdebug_nb.comparison.rules import Rule
from llmdebug_nb.core.kernels import ggml_blocks
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site

Make = Callable[..., Fake]
Array = np.ndarray


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make fakes whose weights have 4 bits by name, and are multiplied as llama.cpp does that."""
    installed(monkeypatch)
    monkeypatch.setitem(fake_ggml.NAMES, Q8_0, "q4_1")
    return lambda: Fake(Q8_0)


def of_the_same_file(fake: Fake) -> Fake:
    """Return a fake in floats with the weights of a quantised one."""
    made = Fake(F32)
    for name, weight in made._weights.items():
        weight.values[...] = fake.dequantised(name).reshape(weight.values.shape)
    return made


def recorded(name: str, fake: Fake, **options: object) -> ld.Run:
    with ld.dump(fake, name=name, **{"tokens": "all", **options}) as run:
        fake.eval([3, 1, 4, 1, 5, 9, 2, 6])
    return run


def compared(mine: Fake, **options: object) -> ld.Report:
    golden = recorded("golden", of_the_same_file(mine), **options)
    return ld.compare(golden, recorded("mine", mine, **options), progress=False)


@pytest.mark.parametrize("options", [{}, {"apis": "!*"}, {"stats_only": True}])
def test_a_right_run_of_a_quantised_file_is_within_noise(
    quantised: Make, options: dict[str, object]
) -> None:
    golden, mine = (
        recorded(name, fake, **options)
        for name, fake in (("golden", of_the_same_file(quantised())), ("mine", quantised()))
    )
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert mine.products == {}.fromkeys([*(f"blk.0.{name}" for name in names), "output"], "q4_1")
    assert golden.products == {}
    if "stats_only" in options:  # an engine's run is compared by its values
        return
    report = ld.compare(golden, mine, progress=False)
    assert (report.verdict, report.findings) == ("within_noise", [])
    ruled = {d.site.path.partition("/")[0] for d in report.differences
             if d.rule is Rule.FACTOR_ROUNDED}  # fmt: skip
    assert {"blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"} <= ruled
    (note,) = (note for note in report.notes() if "rounds to 8 bits first" in note)
    assert "weights in q4_1" in note
    assert "the logits move by 0.0" in note


def test_without_word_of_the_products_the_same_run_diverges(
    quantised: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ld.Run, "products", {})
    report = compared(quantised())
    assert report.verdict == "diverged"
    assert any("limits do not know rounding so coarse" in note for note in report.notes())


@pytest.mark.parametrize(
    ("node", "place"),
    [
        ("norm-0/RMS_NORM", "blk.0.attn_norm"),
        ("Qcur-0/MUL_MAT", "blk.0.attn_q"),
        ("Kcur-0/ROPE", "blk.0"),
        ("kq_soft_max-0/SOFT_MAX", "blk.0"),
        ("ffn_gate-0/MUL_MAT", "blk.0.ffn_gate"),
        ("result_output/MUL_MAT", "output"),
    ],
)
def test_a_tenth_too_much_is_found_at_its_node(quantised: Make, node: str, place: str) -> None:
    mine = quantised()
    mine.spoil[node] = lambda x: (x * np.float32(1.1)).astype(np.float32)
    report = compared(mine)
    assert report.verdict == "diverged"
    assert report.first_divergence is not None
    assert report.first_divergence.site.path.partition("/")[0] == place


def test_before_any_product_limits_are_those_of_floats(quantised: Make) -> None:
    mine = quantised()
    mine.settings["eps"] = 1e-4  # a tenth of a thousandth of what its rows are
    report = compared(mine)
    assert report.verdict == "diverged"
    assert report.first_divergence is not None
    assert report.first_divergence.site.path.startswith("blk.0.attn_norm")


def test_the_same_rounding_of_equal_inputs_explains_nothing(quantised: Make) -> None:
    golden, mine = quantised(), quantised()
    mine.spoil["Qcur-0/MUL_MAT"] = lambda x: (x * np.linspace(0.999, 1.001, x.shape[-1])).astype(
        np.float32
    )
    report = ld.compare(recorded("golden", golden), recorded("mine", mine), progress=False)
    assert report.verdict == "diverged"
    assert report.first_divergence is not None
    assert report.first_divergence.site.path.startswith("blk.0.attn_q")


def factor(x: torch.Tensor, kind: str) -> Factor:
    return Factor(Record(0, Site("a", role="input"), 0, "a", summarize(x)), 1, kind)


@pytest.mark.parametrize(("kind", "block"), [("q4_1", 32), ("iq4_nl", 32), ("q4_K", 256)])
def test_the_noise_of_a_factor_is_that_of_steps_of_its_blocks(kind: str, block: int) -> None:
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    found = factor(x, kind)
    # independent: an error is even within a step, which is a 127th of the largest of a block
    steps = x.reshape(-1, block).abs().amax(1) / 127
    expected = float((steps / math.sqrt(12)).square().mean().sqrt() / x.square().mean().sqrt())
    assert found.error(x) == pytest.approx(expected, rel=0.03)
    assert expected < found.largest_error < 3 * expected


def test_rows_that_are_no_blocks_have_no_noise() -> None:
    assert factor(torch.ones(2, 33), "q4_1").error(torch.ones(2, 33)) == 0.0
    assert factor(torch.zeros(2, 32), "q4_1").error(torch.zeros(2, 32)) == 0.0
    assert factor(torch.zeros(2, 32), "q4_1").largest_error == 0.0


def head(bias: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(bias)
    return model


def test_another_token_within_noise_is_told_with_its_lead(tmp_path: Path) -> None:
    bias = torch.tensor([3.0, 3.001, 0, 0, 0, 0, 0, 0])
    runs = []
    for name, values in (("golden", bias), ("mine", bias[[1, 0, 2, 3, 4, 5, 6, 7]])):
        model = head(values)
        with ld.dump(model, name=name, path=tmp_path) as run, torch.no_grad():
            model(torch.arange(5))
        runs.append(run)
    limits = {"*": {"relative_l2": 0.1}}
    report = ld.compare(*runs, limits=limits, progress=False)
    rows = [d for d in report.differences if d.metrics.get("top1_flips")]
    assert rows
    said = other_tokens.says(rows, runs[0].load, runs[1].load)
    assert "row 4 of 5" in said
    assert "golden prefers token 1 to mine's 0 by 0.001 logits" in said
    assert said.endswith("that is a near tie")
    assert other_tokens.says([], runs[0].load, runs[1].load) == ""


class Ours(torch.nn.Module):
    """A norm and a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.proj = torch.nn.LayerNorm(64), torch.nn.Linear(64, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.proj(self.norm(x))
        return made


class Scaled(torch.nn.Module):
    """A norm whose channels are off by up to a share."""

    def __init__(self, norm: torch.nn.LayerNorm, by: float) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.by = torch.linspace(1 - by, 1 + by, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (64,), self.weight, self.bias) * self.by


class Rounding(torch.nn.Module):
    """A product that rounds its input to blocks of 8 bits."""

    def __init__(self, product: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = product.weight, product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ggml_blocks.roundings_of("q4_1")[0](x).float()
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Theirs(torch.nn.Module):
    """The same by other code."""

    def __init__(self, by: float) -> None:
        super().__init__()
        ours = Ours()
        self.attn_norm, self.attn_q = Scaled(ours.norm, by), Rounding(ours.proj)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attn_q(self.attn_norm(x))
        return made


@pytest.mark.parametrize(("by", "verdict"), [(0.0, "within_noise"), (0.006, "diverged")])
def test_an_error_that_this_noise_hides_behind_it_counts_by_itself(
    monkeypatch: pytest.MonkeyPatch, by: float, verdict: str
) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    runs = []
    for name, model in (("golden", Ours()), ("mine", Theirs(by))):
        with ld.dump(model, name=name) as run, torch.no_grad():
            model(x)
        runs.append(run)
    monkeypatch.setattr(ld.Run, "products", {"attn_q": "q4_1"})
    report = ld.compare(*runs, progress=False)
    results = [d.verdict for d in report.differences if d.pair.golden and d.site.path == ""]
    assert set(results) == {"match", "within_noise"}
    assert report.verdict == verdict
    assert [each.path for each in report.findings] == ["norm"] * (by > 0)
