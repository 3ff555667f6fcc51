"""Logits of an engine's run are compared by request and position, with the mismatch of sampling."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from fake_vllm import LLM, Runner, Whole, installed, served
from llmdebug_nb.cli import main
from llmdebug_nb.comparison.token_checks import TokenCheck, mismatch
from llmdebug_nb.core.errors import CompareError, OptionError
from llmdebug_nb.store.run import Run

PROMPTS = {"a": 3, "b": 5}  # tokens


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def engine(tmp_path: Path, scale: float = 1.0) -> tuple[Run, dict[str, list[int]], Runner]:
    runner = Runner(padding=2)
    with torch.no_grad():
        runner.model.head.weight.mul_(scale)
    with ld.dump(LLM(runner), name="engine", path=tmp_path, tokens="all") as run:
        LLM(runner).generate(served())
    return run, runner.tokens, runner


def whole(tmp_path: Path, texts: dict[str, list[int]]) -> tuple[Run, dict[str, torch.Tensor]]:
    model, logits = Whole(), {}
    model.load_state_dict(Runner().model.state_dict())
    with ld.dump(model, name="whole", path=tmp_path, tokens="all") as run, torch.no_grad():
        for name, text in texts.items():
            positions = torch.arange(len(text))[None]
            logits[name] = model(input_ids=torch.tensor([text]), positions=positions)[0]
    return run, logits


def test_each_position_with_logits_of_both_is_compared_once(tmp_path: Path) -> None:
    mine, texts, _ = engine(tmp_path)
    golden, _ = whole(tmp_path, texts)
    check = ld.logits(golden, mine, progress=False)
    assert check.verdict == "pass"
    # three steps; in each one the last position of both requests has logits
    table = check.to_pandas()
    where = [(one.request, one.token_id, one.sampled) for one in table.itertuples()]
    assert sorted(where) == [
        ("a", 2, True), ("a", 3, True), ("a", 4, True),
        ("b", 1, False), ("b", 4, True), ("b", 5, True),  # b's prompt came in two chunks
    ]  # fmt: skip
    assert "not compared" not in str(check)


def test_ratios_and_divergences_are_those_of_an_independent_calculation(tmp_path: Path) -> None:
    mine, texts, _ = engine(tmp_path, scale=1.3)
    golden, logits = whole(tmp_path, texts)
    check = ld.logits(golden, mine, clip=0.1, progress=False)
    ratios: dict[str, list[float]] = {name: [] for name in texts}
    for one in check.to_pandas().itertuples():
        g = logits[one.request][one.token_id].double().numpy()
        p = np.exp(g - g.max())
        q = np.exp(1.3 * (g - g.max()))
        p, q = p / p.sum(), q / q.sum()
        token = texts[one.request][one.token_id + 1]  # what came next in the text
        assert one.token == token
        assert one.importance_ratio == pytest.approx(p[token] / q[token], rel=1e-5)
        assert one.golden_logprob == pytest.approx(math.log(p[token]), rel=1e-5)
        assert one.kl_divergence == pytest.approx((p * np.log(p / q)).sum(), rel=1e-4)
        if one.sampled:
            ratios[one.request].append(p[token] / q[token])
    by_request = check.by_request().set_index("request")
    for name, expected in ratios.items():
        row = by_request.loc[name]
        assert row["tokens"] == len(expected)
        assert row["mean_ratio"] == pytest.approx(np.mean(expected), rel=1e-5)
        outside = [not 0.9 <= ratio <= 1.1 for ratio in expected]
        assert row["clipped"] == pytest.approx(np.mean(outside))
    text = str(check)
    assert "importance ratio (golden / mine) of 5 sampled tokens" in text
    assert "outside 0.9 to 1.1" in text
    assert "of request b" in text


def test_two_engines_are_compared(tmp_path: Path) -> None:
    first, _, _ = engine(tmp_path)
    second, _, _ = engine(tmp_path)
    check = ld.logits(first, second, progress=False)
    assert check.verdict == "pass"
    assert sorted(check.result.requests) == ["a", "b"]
    assert {one.ratio for one in check.result.tokens} == {1.0}


def test_a_projection_as_wide_as_the_vocabulary_is_no_logits(tmp_path: Path) -> None:
    class Wide(Whole):
        """Its ``mlp`` is followed by a projection onto as many channels as there are tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(8, 50, bias=False)

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            self.wide(self.embed(input_ids))
            return super().forward(input_ids, positions)

    mine, texts, _ = engine(tmp_path)
    model = Wide()
    model.load_state_dict(Runner().model.state_dict(), strict=False)
    with ld.dump(model, name="wide", path=tmp_path, tokens="all") as golden, torch.no_grad():
        for text in texts.values():
            model(input_ids=torch.tensor([text]), positions=torch.arange(len(text))[None])
    check = ld.logits(golden, mine, progress=False)
    assert check.result.sides[0].place == "(root) output[0]"
    assert check.verdict == "pass"


def test_positions_behind_another_token_are_counted(tmp_path: Path) -> None:
    mine, texts, _ = engine(tmp_path)
    other = {"a": texts["a"], "b": [*texts["b"][:2], 49, *texts["b"][3:]]}
    golden, _ = whole(tmp_path, other)
    check = ld.logits(golden, mine, progress=False)
    assert len(check.result.tokens) == 4
    ((why, count),) = check.result.left_out.items()
    assert ("the other run has no logits after the same tokens" in why, count) == (True, 2)


def test_texts_that_have_nothing_in_common_show_their_ids(tmp_path: Path) -> None:
    mine, _, _ = engine(tmp_path)
    golden, _ = whole(tmp_path, {"a": [40, 41], "b": [42]})
    with pytest.raises(CompareError, match=r"begins like.*\[\[40, 41\], \[42\]\]"):
        ld.logits(golden, mine, progress=False)


def test_a_run_without_logits_says_so(tmp_path: Path) -> None:
    mine, texts, _ = engine(tmp_path)
    model = Whole()
    with ld.dump(model, name="body", path=tmp_path, layers="embed") as body, torch.no_grad():
        model(input_ids=torch.tensor([texts["a"]]), positions=torch.arange(len(texts["a"]))[None])
    with pytest.raises(CompareError, match="no"):
        ld.logits(body, mine, progress=False)


@pytest.mark.parametrize("clip", [-1, math.inf, True, "0.2"])
def test_a_clip_that_makes_no_sense_is_named(tmp_path: Path, clip: object) -> None:
    mine, texts, _ = engine(tmp_path)
    golden, _ = whole(tmp_path, texts)
    with pytest.raises(OptionError, match="clip"):
        ld.logits(golden, mine, clip=clip)


def test_the_command_prints_the_mismatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, texts, _ = engine(tmp_path, scale=1.3)
    golden, _ = whole(tmp_path, texts)
    table = tmp_path / "t.csv"
    paths = [str(golden.path), str(mine.path)]
    assert main(["logits", *paths, "--clip", "0.3", "--csv", str(table)]) == 1
    assert "outside 0.7 to 1.3" in capsys.readouterr().out
    assert "importance_ratio" in table.read_text().splitlines()[0]


def check_of(golden: float, mine: float, sampled: bool = True) -> TokenCheck:
    return TokenCheck(
        generation=0, step=0, sequence=0, row=0, token=1, best=(1, 1), rank=1,
        logprob=(golden, mine), margin=0, lost=0, metrics={"kl_divergence": 0.5}, passed=True,
        why="", sampled=sampled,
    )  # fmt: skip


def test_tokens_that_cannot_happen_have_no_finite_ratio_and_do_not_fail() -> None:
    never = -math.inf
    assert check_of(never, 0.0).ratio == 0
    assert check_of(0.0, never).ratio > 1e300
    assert mismatch([check_of(never, never), check_of(0.0, 0.0, sampled=False)], 0.2) is None
    found = mismatch([check_of(-1.0, -1.0), check_of(0.0, never)], 0.2)
    assert found is not None
    assert (found.tokens, found.clipped) == (2, 1)
