"""Trees and chains of a dump end: circles are found where they are read, as our own error."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.checked import MOST_NESTED, check_tree
from recordings import change_index, recorded


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), nn.Linear(2, 2))
    folder = tmp_path_factory.mktemp("graphs")
    return recorded(model, torch.ones(1, 2), mode="module+api+aten", path=folder).path


CIRCLES = {
    "modules in a circle": "UPDATE nodes SET parent = CASE idx WHEN 1 THEN 2 ELSE 1 END",
    "a module in itself": "UPDATE nodes SET parent = idx",
    "a module in one that is not there": "UPDATE nodes SET parent = 77 WHERE idx = 1",
    "modules far too deep": f"""WITH RECURSIVE n(i) AS
        (SELECT 10 UNION ALL SELECT i + 1 FROM n WHERE i < {10 + MOST_NESTED})
        INSERT INTO nodes SELECT i, 'm' || i, 'm', 'M', iif(i = 10, 0, i - 6), '{{}}', '[]', '',
        NULL FROM n""",
    "tensors made of each other": "UPDATE records SET producer = (SELECT max(id) FROM records)",
    "a tensor made of itself": "UPDATE records SET producer = id",
    "calls in each other": """UPDATE operators SET within = (SELECT max(path) FROM operators),
        within_call = 0""",
    "a call in itself": "UPDATE operators SET within = path, within_call = call",
}


def _tour(path: Path) -> None:
    """Do with a run what follows its graphs."""
    run = ld.open_run(path)
    view = RunView(run)
    view.text()
    str(ld.topology(run))
    report = ld.compare(run, ld.open_run(path))
    report.view().text()
    report.view().layers({"op": "layers"})


def test_the_tour_goes_well_with_a_sound_run(sound):
    _tour(sound)


@pytest.mark.parametrize("sql", CIRCLES.values(), ids=CIRCLES)
def test_a_circle_in_a_dump_is_our_own_error(sql, sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "run")
    change_index(path, sql)
    with pytest.raises(ld.errors.CorruptDumpError):
        _tour(path)


def test_two_modules_of_one_path_do_no_harm(sound, tmp_path):
    path = shutil.copytree(sound, tmp_path / "run")
    change_index(path, "UPDATE nodes SET path = '', parent = idx - 1")
    with suppress(ld.LLMDebugError):
        _tour(path)


@given(st.dictionaries(st.integers(0, 9), st.none() | st.integers(0, 10)))
def test_a_tree_is_told_from_what_is_none(parents):
    def ends(child: int) -> bool:
        for _ in range(len(parents) + 1):
            if child not in parents:
                return False
            if parents[child] is None:
                return True
            child = parents[child]
        return False

    if all(map(ends, parents)):
        check_tree(parents)
    else:
        with pytest.raises(ValueError, match=r"is not there|in a circle"):
            check_tree(parents)


def test_trees_are_checked_in_one_pass_however_they_are_ordered():
    chain = {n: n - 1 if n % MOST_NESTED else None for n in range(40 * MOST_NESTED)}
    check_tree(chain)
    check_tree(dict(reversed(chain.items())))
    for root in (MOST_NESTED, "none"):
        with pytest.raises(ValueError, match=r"one another|not there"):
            check_tree({**chain, 0: root})
