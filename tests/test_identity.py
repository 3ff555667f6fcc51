"""A tensor identifies itself if chance does not give another one the same values."""

from __future__ import annotations

import pytest
import torch

from llmdebug_nb.core.identity import identifies_itself, telling_bytes
from llmdebug_nb.core.kernels.summary import summarize

NOTHING = {
    "nothing": torch.zeros(0),
    "zeros": torch.zeros(100),
    "a constant": torch.full((64, 64), 1.25),
    "NaN everywhere": torch.full((9,), torch.nan),
    "three numbers": torch.tensor([0.3, -1.7, 2.9]),
    "one number among zeros": torch.nn.functional.pad(torch.tensor([0.3]), (2, 2)),
    "four numbers of half precision": torch.tensor([0.3, -1.7, 2.9, 0.1]).bfloat16(),
    "the places of three tokens": torch.arange(3),
    "a small mask": torch.ones(5, 5).tril().bool(),
    "a small mask of numbers": torch.ones(5, 5).tril(),
    "a small mask that is added": torch.full((5, 5), -torch.inf).triu(1),
    "a small mask with the lowest number": torch.full((5, 5), torch.finfo().min).triu(1),
}
ITSELF = {
    "four numbers": torch.tensor([0.3, -1.7, 2.9, 0.1]),
    "five numbers of half precision": torch.tensor([0.3, -1.7, 2.9, 0.1, 0.7]).bfloat16(),
    "complex numbers": torch.tensor([0.3, -1.7j, 2.9, 0.1]),
    "numbers beside NaN": torch.tensor([0.3, -1.7, 2.9, 0.1, torch.nan]),
    "numbers among zeros": torch.nn.functional.pad(torch.tensor([0.3, -1.7, 2.9, 0.1]), (9, 9)),
    "tokens": torch.tensor([[31, 4, 15, 9, 26, 53]]),
    "the places of six tokens": torch.arange(6),
    "a large mask": torch.ones(9, 9).tril().bool(),
}


@pytest.mark.parametrize("tensor", NOTHING.values(), ids=NOTHING)
def test_chance_gives_other_tensors_these_values_too(tensor):
    assert not identifies_itself(summarize(tensor))


@pytest.mark.parametrize("tensor", ITSELF.values(), ids=ITSELF)
def test_no_other_tensor_has_these_values_by_chance(tensor):
    assert identifies_itself(summarize(tensor))


def test_bytes_stand_for_a_tensor_only_if_it_identifies_itself():
    assert telling_bytes(summarize(torch.ones(64))) is None
    known = summarize(torch.arange(64.0))
    assert telling_bytes(known) == known.fingerprint is not None
