"""Dataclasses that are made quickly are those that they were."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from llmdebug_nb.core.quick import quick


@dataclass(frozen=True, slots=True)
class Plain:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: float | None = field(default=None, compare=False)


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list)
    d: float | None = field(default=None, compare=False)


@pytest.mark.parametrize("given", [{"a": 1}, {"a": 1, "b": "x", "c": [2], "d": 3.0}])
def test_fields_and_defaults_are_those_of_the_dataclass(given):
    made = Quick(**given)
    assert repr(made) == repr(Plain(**given)).replace("Plain", "Quick")
    assert made == Quick(*given.values())
    assert replace(made, a=2).a == 2
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


def test_each_object_has_a_list_of_its_own():
    Quick(1).c.append(1)
    assert Quick(1).c == []


def test_it_can_not_be_changed_and_says_what_is_missing():
    with pytest.raises(FrozenInstanceError):
        Quick(1).a = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        Quick()  # type: ignore[call-arg]
    assert str(inspect.signature(Quick)) == str(inspect.signature(Plain))
