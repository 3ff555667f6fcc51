"""The tensors of a pair are read once while there is room, and compared as if read each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmdebug_nb.align.values import Tensor, Tensors, Values
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site

SIZE = 256  # bytes of each tensor


def random(n):
    return torch.randn(SIZE // 4, generator=torch.Generator().manual_seed(n))


@pytest.fixture
def read():
    return []


@pytest.fixture
def records():
    return [Record(n, Site("m"), n, "A", summarize(random(n)), payload=n) for n in range(6)]


def reader(read):
    def load(side):
        def of(record):
            read.append((side, record.id))
            if record.id == 5:
                raise CorruptDumpError("damaged")
            return random(record.id)

        return of

    return Tensors((load(0), load(1)))


def test_a_tensor_is_read_once(read, records):
    tensors = reader(read)
    first = [tensors.of(record, side) for record in records[:4] for side in (0, 1)]
    again = [tensors.of(record, side) for record in records[:4] for side in (0, 1)]
    assert all(one is other for one, other in zip(first, again, strict=True))
    assert read == [(side, n) for n in range(4) for side in (0, 1)]
    assert torch.equal(first[2].real, random(1))


def test_the_tensor_that_was_used_longest_ago_makes_room(read, records, monkeypatch):
    monkeypatch.setattr(constants, "KEPT_BYTES", 2 * SIZE)
    tensors = reader(read)
    for n in (0, 1, 0, 2, 0, 1):
        tensors.of(records[n], 0)
    assert [n for _, n in read] == [0, 1, 2, 1]


def test_a_tensor_larger_than_the_room_is_read_and_not_kept(read, records, monkeypatch):
    monkeypatch.setattr(constants, "KEPT_BYTES", SIZE // 2)
    tensors = reader(read)
    for _ in range(2):
        assert torch.equal(tensors.of(records[0], 0).read, random(0))
    assert len(read) == 2


def test_what_is_not_there_as_a_whole_is_none(read, records):
    tensors = reader(read)
    assert tensors.of(replace(records[0], payload=None), 0) is None
    assert tensors.of(replace(records[0], kept="minmax"), 0) is None
    assert not read
    assert tensors.of(records[5], 0) is None
    assert tensors.both(records[5], records[0]) is None
    assert tensors.both(records[0], replace(records[1], payload=None)) is None
    assert Tensors(None).of(records[0], 0) is None


@pytest.mark.parametrize("fill", [None, float("-inf"), torch.finfo(torch.float32).min])
def test_a_tensor_that_is_compared_again_has_the_same_error(fill):
    sides = [random(1), random(1) * 1.01]
    if fill is not None:
        for side in sides:
            side[::7] = fill
    golden, mine = map(Tensor, sides)
    for _ in range(2):
        kept, own = Values.between(golden, mine), Values.of(*sides)
        assert (kept.error, kept.confirmed) == (own.error, own.confirmed)
        # as `Tensor.norm` has it
        shown = [side[side > -1e30] for side in sides]
        size = float((shown[0] - shown[0].mean()).square().sum()) ** 0.5
        assert kept.error == float((shown[1] - shown[0]).norm()) / size
