"""The frozen answers: what counts as a change, and that a run that was stopped goes on."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import llmdebug_nb as ld

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import answering
import answers
from answering import Answer
from answers import Journal, Kind, Task

PLACE = {"path": "a", "cause": "introduced", "relation": "", "line": "m.py:3", "code": "y = x"}
RULED = SimpleNamespace(verdict="match", rule="bigger")


def told(grade: str = "exact", verdict: str = "diverged", **place: str) -> Answer:
    return {
        "verdict": verdict,
        "rows": {"match": 3},
        "findings": [PLACE | place],
        "grade": grade,
    }


def kinds(old: Answer, new: Answer, rules: bool = False) -> list[str]:
    return [each.kind for each in answers.changes("case", old, new, rules)]


# -- what changed ----------------------------------------------------------------------------------


def test_each_field_that_changed_is_a_line_with_both_values() -> None:
    found = answers.changes("zoo/1", told(), told(cause="weight differs", verdict="match"))
    assert list(map(str, found)) == [
        "zoo/1: verdict: diverged -> match",
        "zoo/1: finding 1 cause: introduced -> weight differs",
    ]
    assert answers.changes("zoo/1", told(), told()) == []


def test_a_finding_or_a_count_that_one_answer_lacks_is_a_change() -> None:
    fewer = told() | {"findings": [], "rows": {"match": 3, "diverged": 1}}
    found = answers.changes("case", told(), fewer)
    assert "case: rows diverged: - -> 1" in map(str, found)
    assert "case: finding 1 path: a -> -" in map(str, found)
    assert {each.kind for each in found} == {"rows", "path", "cause", "relation", "line"}


def test_a_relation_in_which_only_digits_differ_is_a_matter_of_figures() -> None:
    half, third = told(relation="golden's times 0.5"), told(relation="golden's times 0.3")
    assert kinds(half, third) == ["figures"]
    assert kinds(half, told(relation="golden's, reversed")) == ["relation"]


def test_a_line_with_another_number_and_the_same_text_has_moved() -> None:
    assert kinds(told(), told(line="m.py:9")) == ["moved"]
    assert kinds(told(), told(line="m.py:9", code="z = x")) == ["line"]
    assert kinds(told(code=""), told(line="m.py:9", code="")) == ["line"]


def test_counts_of_rules_are_told_only_on_demand() -> None:
    old, new = (told() | {"rules": {"bigger": count}} for count in (1, 2))
    assert kinds(old, new) == []
    assert kinds(old, new, rules=True) == ["rules"]


def test_the_summary_counts_cases_kinds_and_grades() -> None:
    frozen = {"ports/a": told(), "ports/b": told(), "zoo/c": told(), "zoo/gone": told()}
    now = {"ports/a": told("late", path="b"), "ports/b": told(), "zoo/c": told(), "zoo/d": told()}
    lines = answers.summary(frozen, now).splitlines()
    assert lines[:2] == ["ports/a: finding 1 path: a -> b", "ports/a: grade: exact -> late"]
    assert lines[2:4] == [
        "zoo/d: is new",
        "4 cases: 2 same, 1 changed, 1 new; 1 frozen ones were not asked",
    ]
    assert "  grade: 1 in 1 cases" in lines
    assert "ports, grades: exact 2 -> 1, late 0 -> 1" in lines
    assert "zoo, causes: introduced 1" in lines


def test_the_frozen_file_has_a_case_a_line_and_is_read_back(tmp_path: Path) -> None:
    file, cases = tmp_path / "answers.json", {"zoo/b": told(), "ports/a": told("late")}
    answers.freeze(file, cases, {"torch": "2"})
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [line.partition(": ")[0] for line in lines[2:-1]] == ['"ports/a"', '"zoo/b"']
    assert answers.thaw(file) == (cases, {"torch": "2"})
    assert answers.thaw(tmp_path / "none.json") == ({}, {})


def test_a_sample_takes_each_so_many_th_of_the_cases_that_fit() -> None:
    cases = [f"{kind}/{number}" for number in range(4) for kind in ("zoo", "ports")]
    assert answers.chosen(cases, ["zoo"], 2) == ["zoo/0", "zoo/2"]
    assert answers.chosen(cases, ["*/1", "zoo/3"], 1) == ["ports/1", "zoo/1", "zoo/3"]


# -- going on --------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """A journal; of the kind ``toy`` each case but ``bad`` is answered with its own name."""

    def toys(task: Task) -> Iterator[answers.Asked]:
        for case in task.cases:
            if case == "bad":
                raise OSError
            yield case, partial(dict, verdict=case)

    monkeypatch.setitem(answers.KINDS, "toy", Kind(lambda folder: iter(()), toys, ()))
    monkeypatch.setattr(answers, "stamp", lambda kind: "now")
    return Journal(tmp_path / "out" / "answers.jsonl")


def test_what_was_answered_is_not_asked_again(journal: Journal) -> None:
    tasks = [Task("toy/a", ("x", "y")), Task("toy/b", ("x",))]
    answers.work(Task("toy/a", ("x",)), journal)
    known = journal.read(answers.stamp)
    assert known == {"toy/a/x": {"verdict": "x"}}
    left = answers.remaining(tasks, [case for task in tasks for case in task.full()], known)
    assert left == [Task("toy/a", ("y",)), Task("toy/b", ("x",))]
    assert answers.remaining(tasks, ["toy/a/y"], known) == [Task("toy/a", ("y",))]


def test_a_line_that_was_cut_short_is_no_answer(journal: Journal) -> None:
    answers.work(Task("toy/a", ("x", "y")), journal)
    text = journal.path.read_text(encoding="utf-8")
    journal.path.write_text(text[:-9], encoding="utf-8")
    assert set(journal.read(answers.stamp)) == {"toy/a/x"}


def test_an_answer_of_other_sources_is_no_answer(journal: Journal) -> None:
    answers.work(Task("toy/a", ("x",)), journal)
    assert journal.read(lambda kind: "later") == {}


def test_what_cannot_be_recorded_is_answered_by_the_type_of_the_error(journal: Journal) -> None:
    answers.work(Task("toy/a", ("x", "bad", "y")), journal)
    assert journal.read(answers.stamp) == {
        "toy/a/x": {"verdict": "x"},
        "toy/a/bad": {"verdict": "failed: OSError"},
        "toy/a/y": {"verdict": "failed: OSError"},
    }


def test_what_takes_too_long_is_stopped_whatever_it_catches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow() -> Answer:
        with contextlib.suppress(Exception):
            time.sleep(60)
        return {"verdict": "match"}

    monkeypatch.setattr(answers, "LIMIT", 0.05)
    assert answers.tried(slow) == {"verdict": "failed: TimeoutError"}
    assert answers.tried(lambda: {"verdict": "match"}) == {"verdict": "match"}


def test_a_change_to_the_judgement_asks_everything_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, here = tmp_path / "llmdebug_nb", tmp_path / "benchmarks"
    for file in (package / "align" / "x.py", package / "show" / "x.py", here / "answering.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("a = 1\n", encoding="utf-8")
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    monkeypatch.setattr(answers, "HERE", here)

    def stamped() -> str:
        answers.stamp.cache_clear()
        return answers.stamp("programs")

    first = stamped()
    (package / "show" / "x.py").write_text("a = 2\n", encoding="utf-8")
    assert stamped() == first
    (package / "align" / "x.py").write_text("a = 2\n", encoding="utf-8")
    assert stamped() != first
    answers.stamp.cache_clear()


# -- what a comparison answers ---------------------------------------------------------------------


def test_a_comparison_that_fails_is_collected_and_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compare(what: str) -> object:
        raise ValueError(what)

    monkeypatch.setattr(ld, "compare", compare)
    with answering.collected() as found, pytest.raises(ValueError, match="runs"):
        ld.compare("runs")
    assert found == [{"verdict": "failed: ValueError"}]
    assert ld.compare is compare


def test_rules_are_counted_where_rows_or_findings_name_them() -> None:
    coverage = SimpleNamespace(
        observables=2, observables_matched=1, values=5, values_matched=3, rejoined=0
    )
    plain = SimpleNamespace(verdict="match", coverage=coverage, differences=[], findings=[])
    ruled = SimpleNamespace(**vars(plain) | {"differences": [RULED, RULED]})
    assert "rules" not in answering.answer(plain)
    assert answering.answer(ruled)["rules"] == {"bigger": 2}
    assert answering.answer(ruled)["rows"] == {"match": 2}
    assert answering.answer(plain)["coverage"]["values"] == "3 of 5"


def test_the_comparisons_of_a_program_are_collected_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(
        "import torch\n"
        "import llmdebug_nb as ld\n"
        "def run(name, factor):\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    torch.nn.init.constant_(model.weight, factor)\n"
        "    torch.nn.init.zeros_(model.bias)\n"
        "    with ld.dump(model, name=name) as run:\n"
        "        model(torch.ones(3, 2))\n"
        "    return run\n",
        encoding="utf-8",
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import helper\n"
        "import llmdebug_nb as ld\n"
        "one, same, other = (helper.run(f'r{n}', f) for n, f in enumerate((1, 1, 2)))\n"
        "ld.compare(one, other)\n"
        "print(ld.compare(one, same))\n"
        "raise KeyError\n",
        encoding="utf-8",
    )
    (task,) = answers.programs_tasks(tmp_path)
    assert task == Task("programs/program", (str(program),))
    (found,) = [ask() for _, ask in answers.programs_asked(task)]
    assert found["ended"] == "failed: KeyError"
    assert [each["verdict"] for each in found["comparisons"]] == ["diverged", "match"]
    assert not (tmp_path / "llmdebug_runs").exists()
    assert json.dumps(found)
