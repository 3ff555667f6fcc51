"""Switching rules off: each is there, says when it fires, and is on again afterwards."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import rules
from answering import Answer
from rules import CONTROL, SWITCHES, Switch

from llmdebug_nb.causes import judge
from llmdebug_nb.comparison import noise

LEVEL = noise.Level(error=3.0, cap=5.0)


def switch(name: str) -> Switch:
    return next(each for each in SWITCHES if each.name.endswith(name))


def test_each_switch_is_of_something_that_the_package_has_and_puts_it_back() -> None:
    for each in (CONTROL, *SWITCHES):
        owner, name = each.place
        before = vars(owner)[name]
        for counts in (None, Counter[str]()):
            with ExitStack() as stack:
                each.put(stack, counts)
            assert vars(owner)[name] is before, each.name


def test_no_two_switches_have_one_name() -> None:
    assert max(Counter(each.name for each in SWITCHES).values()) == 1


def test_each_rule_of_the_judge_has_a_switch() -> None:
    left_out = {each.neutral for each in SWITCHES if isinstance(each.neutral, str)}
    assert left_out == {rule.__name__ for rule in judge.RULES}


def test_a_rule_that_is_off_has_nothing_to_say() -> None:
    with ExitStack() as stack:
        switch("(cap)").put(stack)
        assert LEVEL.limit(1.0, 4.0) == 5.0  # of 3 and 4
    assert LEVEL.limit(1.0, 3.0) > 5.0


def test_a_member_of_the_judges_rules_is_left_out() -> None:
    with ExitStack() as stack:
        switch(": _overflow").put(stack)
        assert judge.Judge._overflow not in judge.RULES
        assert judge.Judge._wrong_weight in judge.RULES


def test_a_rule_fires_if_it_says_something() -> None:
    counts = Counter[str]()
    with ExitStack() as stack:
        cap = switch("(cap)")
        cap.put(stack, counts)
        noise.Level(error=3.0).limit(1.0, 4.0)
        assert not counts[cap.name]
        LEVEL.limit(1.0, 4.0)
        assert counts[cap.name] == 1


def told(grade: str = "exact", cause: str = "introduced", path: str = "a", rows: int = 1) -> Answer:
    return {
        "grade": grade,
        "verdict": "diverged",
        "rows": {"match": rows},
        "findings": [{"path": path, "cause": cause}],
    }


@pytest.mark.parametrize(
    ("new", "effect"),
    [
        (told(), "same"),
        (told(grade="late", path="b"), "worse"),
        (told(grade="right"), "better"),
        (told(path="b", cause="unknown"), "place"),
        (told(cause="unknown"), "cause"),
        (told(rows=2), "rows"),
    ],
)
def test_what_a_rule_changes_is_told_by_the_heaviest_change(new: Answer, effect: str) -> None:
    assert rules.effect("case", told(), new)[0] == effect


def test_which_cases_are_asked_depends_on_names_alone() -> None:
    names = [f"case {number}" for number in range(9)]
    assert rules.shuffled(names) == rules.shuffled(reversed(names)) != names
