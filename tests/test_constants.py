"""The benchmark of the constants: values are changed and put back, and what matters is found."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.comparison import noise
from llmdebug_nb.core import constants

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import constants as benchmark

NAMES = benchmark.judgements()
DEFAULTS = {name: vars(constants)[name] for name in NAMES}


@dataclass
class FakeCase:
    """A case whose answer tells which of some constants are changed."""

    telling: tuple[str, ...]
    name: str = "fake"
    compared: int = 0

    def record(self, folder: Path) -> None:
        raise AssertionError("it is recorded already")

    def told(self, golden: ld.Run, mine: ld.Run) -> tuple[str, list[str]]:
        self.compared += 1
        values = {name: getattr(constants, name) for name in NAMES}
        changed = [name for name in self.telling if values[name] != DEFAULTS[name]]
        return ("wrong" if changed else "exact"), ["diverged", *changed]


def _table(told: list[benchmark.Told], names: list[str]) -> str:
    return benchmark.table(benchmark.by_constant(told, names))


@pytest.fixture(autouse=True)
def _no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "recorded", lambda case, folder: (None, None))


def test_judgements_are_numbers_and_no_work_limits():
    assert {"SAME_VALUES", "AMPLIFICATION", "CERTAIN_NATS"} <= set(NAMES)
    assert not {"LAYOUTS_TRIED", "CHUNK", "NAMES_SHOWN"} & set(NAMES)
    assert {type(value) for value in DEFAULTS.values()} == {int, float}


def test_a_constant_is_changed_for_a_while_and_decides_meanwhile():
    before = noise.floor(1e-3, 64)
    with benchmark.changed(["SUM_SHARE", "WRONG_LAYOUT", "FEW_CARRIERS"], 0.5):
        assert constants.SUM_SHARE == 0.0625
        assert constants.WRONG_LAYOUT == 0.125
        assert (constants.FEW_CARRIERS, type(constants.FEW_CARRIERS)) == (4, int)
        assert noise.floor(1e-3, 64) - 1e-3 == pytest.approx(0.5 * (before - 1e-3))
    assert {name: vars(constants)[name] for name in NAMES} == DEFAULTS


def test_what_is_read_is_seen():
    with benchmark.watched() as reads:
        noise.floor(1e-3, 64)
    noise.scale_floor(1e-3, 64)
    assert reads == {"SUM_SHARE"}


@given(st.sets(st.sampled_from(NAMES)), st.integers(1, len(NAMES)))
def test_of_constants_that_are_changed_at_once_each_that_matters_is_found(
    telling: set[str], at_once: int
) -> None:
    case = FakeCase(tuple(telling))
    default = benchmark.usual(case, (None, None))
    found = []
    for start in range(0, len(NAMES), at_once):
        some = NAMES[start : start + at_once]
        found += benchmark.compared(case, (None, None), default, some, 2.0)
    assert {told.constants for told in found if told.grade == "wrong"} == {(n,) for n in telling}
    assert sorted(name for told in found for name in told.constants) == sorted(NAMES)


def test_an_interrupted_benchmark_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lines = tmp_path / "told.jsonl"
    first = FakeCase(("SAME_VALUES",))
    whole = benchmark.run([first], NAMES, tmp_path, lines)
    kept = lines.read_text().splitlines()
    lines.write_text("".join(f"{line}\n" for line in kept[: len(kept) // 2]))
    again = FakeCase(("SAME_VALUES",))
    resumed = benchmark.run([again], NAMES, tmp_path, lines)
    assert 0 < again.compared < first.compared
    assert _table(resumed, NAMES) == _table(whole, NAMES)
    assert benchmark.run([FakeCase(())], NAMES, tmp_path, lines) == resumed
    assert {json.loads(line)["case"] for line in kept} == {"fake"}


def test_the_table_counts_answers_at_half_and_at_twice_the_value(tmp_path: Path) -> None:
    told = benchmark.run([FakeCase(("EVEN_SHARE",))], NAMES, tmp_path, tmp_path / "told.jsonl")
    rows = _table(told, ["EVEN_SHARE", "EVEN_ERRORS"]).splitlines()
    assert rows[2] == "|EVEN_SHARE|0.25|1|1 / 0 / 0|0 / 0 / 0|0 / 0 / 0|2|"
    assert rows[3] == "|EVEN_ERRORS|8|1|1 / 0 / 0|1 / 0 / 0|1 / 0 / 0|0|"
    text = benchmark.changes(benchmark.by_constant(told, ["EVEN_SHARE", "EVEN_ERRORS"]))
    assert "* EVEN_SHARE × 2: fake: exact → wrong" in text
    assert "Change no answer: EVEN_ERRORS." in text


def test_the_cases_are_a_fixed_sample_of_all_sets():
    names = [case.name for case in benchmark.cases(["ports", "zoo", "more"])]
    assert names == [case.name for case in benchmark.cases(["more", "zoo", "ports"])]
    assert len(set(names)) == len(names) >= 50
    assert {name.partition(":")[0] for name in names} == {"ports", "zoo", "more"}
    for words in ("right, modules bf16", "right, functions bf16", "modules fp32", "functions fp32"):
        assert any(words in name for name in names), words
