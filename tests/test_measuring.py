"""Measuring in threads: the same bits in the same order, each pair of payloads once."""

import pickle
import threading
import time
from collections import Counter

import pytest
import torch

from llmdebug_nb.align.pairing import pair
from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import engine, jobs, threads
from llmdebug_nb.comparison.jobs import Job, Outcome
from llmdebug_nb.comparison.metrics import compare
from llmdebug_nb.core import constants
from llmdebug_nb.core.determinism import threads as torch_threads
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Record, Site


def _record(number, x, role="output"):
    site = Site(f"layer{number}", role=role)
    return Record(number, site, number, "Linear", summarize(x), payload=str(number))


class Side:
    """Tensors of a run, and how often each was read."""

    def __init__(self, tensors):
        self.tensors, self.reads = tensors, Counter()
        self.records = [_record(number, x) for number, x in enumerate(tensors)]

    def load(self, record):
        self.reads[record.payload] += 1
        x = self.tensors[int(record.payload)]
        if isinstance(x, Exception):
            raise x
        return x


def _sides(count=40):
    """Two runs; tensors of many sizes, some of them the same bytes, one quantised, one logits."""
    random = torch.Generator().manual_seed(0)
    golden = [torch.randn(3 + 97 * (n % 7), 65, generator=random) for n in range(count)]
    golden.append(torch.randn(1024, 1024, generator=random))  # torch adds it up in parts
    mine = [x + 1e-4 * torch.randn(x.shape, generator=random) for x in golden]
    mine[3], mine[5] = golden[3].clone(), golden[5].bfloat16().float()
    return Side(golden), Side(mine)


def _pairs(golden, mine):
    found = [Pair(a, b, "same site") for a, b in zip(golden.records, mine.records, strict=True)]
    return [*found, *found[::3]]  # the same payloads at other places


def _measured(count):
    golden, mine = _sides()
    pairs = _pairs(golden, mine)

    def work(jobs, here):
        return threads.in_threads(jobs, here, count)

    found = engine.measure(pairs, golden.load, mine.load, work=work)
    assert max(golden.reads.values()) == max(mine.reads.values()) == 1
    assert [m.index for m in found] == list(range(len(pairs)))
    return [(m.metrics, m.remark, m.same_bytes, m.certain, m.rounded, m.error) for m in found]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("of_torch", [1, 2])
def test_any_number_of_threads_gives_the_same_bits_in_the_same_order(count, of_torch, monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 3)
    monkeypatch.setattr(constants, "SMALL_BYTES", 10_000)
    with torch_threads(of_torch):
        assert _measured(count) == _measured(1)
        assert torch.get_num_threads() == of_torch


def test_a_figure_has_one_value_for_any_number_of_threads():
    random = torch.Generator().manual_seed(1)
    golden = torch.randn(3, 300_000, generator=random)
    mine = golden + 1e-5 * torch.randn(golden.shape, generator=random)
    found = []
    for count in (1, 2, 4):
        with torch_threads(count):
            found.append(compare(golden, mine, logits=True))
    assert found[0] == found[1] == found[2]
    exact = (golden.double() * golden.double()).sum()
    apart = (mine.double() - golden.double()).square().sum()
    assert found[0]["relative_euclidean_distance"] == pytest.approx(float((apart / exact).sqrt()))


def test_what_can_not_be_read_is_a_row_with_the_reason_in_any_thread(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 2)
    golden, mine = _sides(12)
    mine.tensors[7] = CorruptDumpError("payload.bin: it ends early")
    found = engine.measure(
        _pairs(golden, mine), golden.load, mine.load,
        work=lambda jobs, here: threads.in_threads(jobs, here, 3),
    )  # fmt: skip
    assert [m.remark for m in found if m.metrics is None] == ["payload.bin: it ends early"]


def test_an_error_in_a_thread_is_raised_where_it_was_asked_for(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 2)
    golden, mine = _sides(12)
    mine.tensors[7] = MemoryError("too large")
    with pytest.raises(MemoryError, match="too large"):
        engine.measure(
            _pairs(golden, mine), golden.load, mine.load,
            work=lambda jobs, here: threads.in_threads(jobs, here, 2),
        )  # fmt: skip


def _jobs(count):
    record = _record(0, torch.zeros(2))
    return [Job(record, record, None, False) for _ in range(count)]


def test_closing_it_ends_the_threads_after_the_job_that_each_is_at(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 1)
    done = []
    before = threading.active_count()

    def here(job):
        done.append(job)
        time.sleep(0.01)
        return Outcome({}, None, None)

    found = threads.in_threads(_jobs(500), here, 2)
    next(found)
    found.close()
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(done) < 500


def test_no_two_large_pairs_are_held_at_once(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_JOBS", 1)
    monkeypatch.setattr(constants, "SMALL_BYTES", 0)
    monkeypatch.setattr(constants, "ALONE_BYTES", 1)
    held, most = [], []

    def here(job):
        held.append(job)
        most.append(len(held))
        time.sleep(0.002)
        held.pop()
        return Outcome({}, None, None)

    assert len(list(threads.in_threads(_jobs(30), here, 4))) == 30
    assert max(most) == 1


def test_batches_hold_all_jobs_in_order_and_few_bytes(monkeypatch):
    monkeypatch.setattr(constants, "BATCH_BYTES", 1000)
    golden, mine = _sides(20)
    made = [Job(a, b, None, False) for a, b in zip(golden.records, mine.records, strict=True)]
    found = list(jobs.batches(made))
    assert [number for batch in found for number, _ in batch] == list(range(len(made)))
    assert all(sum(job.nbytes for _, job in batch[:-1]) < 1000 for batch in found)
    assert made[0].nbytes == 2 * 4 * 3 * 65


def test_the_layout_of_a_pair_goes_to_another_process_by_name():
    random = torch.Generator().manual_seed(2)
    golden = [torch.randn(6, 32, generator=random), torch.randn(4, 6, 16, generator=random)]
    mine = [golden[0].t().contiguous(), golden[1].permute(1, 0, 2).reshape(6, 64).contiguous()]
    sides = Side(golden), Side(mine)
    found = pair(sides[0].records, sides[1].records, load=(sides[0].load, sides[1].load))
    fits = [each for each in found if each.fit is not None]
    assert len(fits) == 2
    for each in fits:
        again = pickle.loads(pickle.dumps(each.fit))
        tensors = sides[0].load(each.golden), sides[1].load(each.mine)
        one, other = again(*tensors)
        assert torch.equal(one, other)
        assert again.says == each.fit.says
