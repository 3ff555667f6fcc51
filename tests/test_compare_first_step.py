"""The first step of long recordings is compared before the others."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.app.compare import first_steps
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import NotADumpError
from llmdebug_nb.store import reader
from llmdebug_nb.store.views import VIEWS
from models import generate, llama, prompt
from recordings import record


def recorded(name: str, model: Any, **options: Any) -> ld.Run:
    work = functools.partial(generate, model, prompt(3), new=3)
    return record(model, work, name, **{"mode": "module+api", **options})


@pytest.fixture
def runs() -> tuple[ld.Run, ld.Run]:
    golden, mine = llama(), llama()
    with torch.no_grad():
        mine.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    return recorded("golden", golden), recorded("mine", mine)


def rows(run: ld.Run, view: str) -> list[tuple[object, ...]]:
    return run.index.query(VIEWS[view].row(), f"SELECT * FROM {view}")


@pytest.mark.parametrize("view", VIEWS)
def test_a_run_of_one_step_has_the_rows_of_it_and_all_that_belongs_to_none(
    runs: tuple[ld.Run, ld.Run], view: str
) -> None:
    whole = rows(runs[0], view)
    columns = list(VIEWS[view].columns)
    if "step" in columns:
        whole = [row for row in whole if row[columns.index("step")] == 1]
    assert rows(reader.of_step(runs[0], (0, 1)), view) == whole


def test_the_tensors_of_one_step_are_those_of_the_run(runs: tuple[ld.Run, ld.Run]) -> None:
    one = reader.of_step(runs[0], (0, 1))
    assert 0 < len(one) < len(runs[0])
    for each in one.records():
        assert torch.equal(one.load(each), runs[0].load(each))


def test_several_processes_are_one_run_of_that_step(tmp_path: Path) -> None:
    run = recorded("ranks", llama(num_hidden_layers=1))
    assert run.path is not None
    folder = next(run.path.glob("rank0*"))
    shutil.copytree(folder, run.path / "rank1_1")
    both = ld.open_run(run.path)
    one = reader.of_step(both, (0, 1))
    steps = [(r.site.generation, r.site.step) for r in both.records()]
    assert len(set(steps)) > 3  # those of the further process are other generations
    assert len(one) == steps.count((0, 1)) > 0


def test_the_first_step_gives_the_finding_that_all_steps_give(
    runs: tuple[ld.Run, ld.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "FIRST_STEP_FROM", 1)
    first = first_steps(*runs)
    assert first is not None
    early, whole = ld.compare(*first), ld.compare(*runs)
    assert {d.site.step for d in early.differences} == {0}
    assert early.verdict == whole.verdict == "diverged"
    assert (early.findings[0].path, early.findings[0].cause) == (
        whole.findings[0].path, whole.findings[0].cause,
    )  # fmt: skip


def test_short_recordings_and_those_that_begin_elsewhere_have_no_early_answer(
    runs: tuple[ld.Run, ld.Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert first_steps(*runs) is None
    monkeypatch.setattr(constants, "FIRST_STEP_FROM", 1)
    later = recorded("later", llama(), tokens="1-2")
    assert first_steps(runs[0], later) is None
    single = recorded("single", llama(), tokens="0")
    assert first_steps(single, single) is None
    torch.save(torch.ones(2), tmp_path / "x.pt")
    foreign = ld.open_run(tmp_path / "x.pt")
    assert first_steps(foreign, foreign) is None


def test_a_run_of_another_tool_can_not_be_read_by_steps(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "x.pt")
    with pytest.raises(NotADumpError, match="no run of ours"):
        reader.of_step(ld.open_run(tmp_path / "x.pt"), (0, 0))
