"""Only known operators are replayed, those of a run from elsewhere in a process of their own."""

from __future__ import annotations

import copy
import os
import signal
import sqlite3
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.app import live_models
from llmdebug_nb.core import constants
from llmdebug_nb.core.torch_internals import dispatched_operators
from llmdebug_nb.replay import execution, operators, worker
from llmdebug_nb.replay.execution import Task
from llmdebug_nb.replay.operators import CannotReplay

MOST = 1 << 20
# they read what a stride or a pointer says, open files, change objects, or are not meant for users
UNSAFE = """
Aten._reshape_alias Aten.as_strided Aten.set_.source_Storage_storage_offset Aten.resize_
Aten.from_file Aten.empty_strided Aten._embedding_bag Aten.lu_solve Aten.segment_reduce
Torch.as_strided Torch.load Torch.from_file Torch.fbgemm_pack_quantized_matrix Torch.lu_unpack
Tensor.set_ Tensor.resize_ Tensor.apply_ Tensor.__setstate__ Tensor.__reduce_ex__
Tensor.__setattr__ Tensor.__getattribute__ Tensor.setattr Tensor.new Tensor.data_ptr
Tensor.const_data_ptr Tensor.share_memory_ Tensor.register_hook Tensor.storage Tensor.as_subclass
Torch.linalg.lu_solve Torch.linalg.torch.load Torch.functional.torch.load Torch.fft.as_strided
Torch.functional.functional Functional.embedding_bag Functional.ctc_loss
Functional.max_unpool2d Functional.boolean_dispatch
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def replays() -> worker.Replays:
    return worker.Replays()


@pytest.mark.parametrize("name", UNSAFE)
def test_an_operator_that_is_not_on_the_list_is_refused(name):
    with pytest.raises(CannotReplay):
        operators.replayed(name)


def test_no_operator_on_the_list_is_told_where_memory_lies():
    found = 0
    for name in sorted(dispatched_operators()):
        namespace, _, bare = name.partition("::")
        try:
            op = f"Aten.{bare}" if namespace == "aten" else "no"
            operators.replayed(op)  # one whose formula runs has the schema of its kernel
            _, function = operators.operator(op)
        except (CannotReplay, AttributeError):
            continue
        given = {argument.name: str(argument.type) for argument in function._schema.arguments}
        assert not {"storage_offset", "filename", "storage"} & given.keys(), name
        assert not {"size", "stride"} <= given.keys(), name
        assert not {"Storage", "Stream", "PyObject", "Any"} & set(given.values()), name
        found += 1
    assert found > 800


def _tasks() -> list[Task]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 6, 8), torch.randn(8, 8)
    half, ids = x.to(torch.bfloat16), torch.tensor([[1, 0, 5]])
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return [
        Task("Functional.linear", [x, w], {"bias": None}, MOST),
        Task("Functional.linear", [half, w.to(torch.bfloat16)], {}, MOST),
        Task("Functional.embedding", [ids, w], {}, MOST),
        Task("Functional.scaled_dot_product_attention", [x, x, x], {"attn_mask": mask}, MOST),
        Task("Functional.dropout", [x], {"p": 0.5, "training": True}, MOST, seed=3),
        Task("Functional.softmax", [x], {"dim": -1, "dtype": torch.float64}, MOST, steps=True),
        Task("Torch.cat", [(x, x)], {"dim": 1}, MOST, {"0": (2, 12, 8)}),
        Task("Aten.arange", [5], {"device": torch.device("cpu"), "dtype": torch.int32}, MOST),
        Task("Torch.topk", [x, 3], {}, MOST),
        Task("Aten.full", [(2, 3), float("-inf")], {}, MOST),
        Task("Tensor.getitem", [x, (slice(None, None, 2), ..., None, 1)], {}, MOST),
        Task("Tensor.masked_fill_", [x.clone(), mask[:, :1].expand(6, 8), -1e9], {}, MOST),
        Task("Tensor.mul", [torch.view_as_complex(x.reshape(2, 6, 4, 2)), 1 + 2j], {}, MOST),
        Task("Aten.add.Tensor", [x.transpose(0, 1), 1], {"alpha": 2}, MOST),
        Task("VF.lstm_cell", [x[0], (x[0], x[0]), *[torch.randn(32, 8)] * 2, None, None], {}, MOST),
    ]


@pytest.mark.parametrize("task", _tasks(), ids=lambda task: task.op)
def test_a_replay_gives_the_same_bits_in_both_processes(task, replays):
    there, here = replays.run(copy.deepcopy(task)), execution.run(task)
    assert [slot for slot, _ in there] == [slot for slot, _ in here]
    assert here
    for (_, one), (_, other) in zip(there, here, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Task("Torch.mm", [torch.ones(2, 3), torch.ones(2, 3)], {}, MOST), "fails"),
        (Task("Torch.relu", [torch.ones(2)], {}, MOST, {"0": (3,)}), "were recorded"),
        (Task("Torch.relu", ["text"], {}, MOST), "fails"),
        (Task("Aten.full", [(1 << 40,), 0.0], {}, MOST), "far larger"),
        (Task("Aten.full", [(1 << 50,), 0.0], {}, 1 << 60), "fails"),
        (Task("Functional.embedding", [torch.tensor([9]), torch.ones(2, 2)], {}, MOST), "fails"),
        (Task("Torch.index_select", [torch.ones(2), 0, torch.tensor([-7])], {}, MOST), "fails"),
        (Task("Aten._reshape_alias", [torch.ones(2), (9,), (1 << 40,)], {}, MOST), "not one of"),
        (Task("Torch.relu", [torch.ones(2), 10**400], {}, MOST), "fails"),
    ],
)
def test_unsuitable_arguments_are_an_answer_in_both_processes(task, why, replays):
    for run in (replays.run, execution.run):
        if task.most == 1 << 60 and run is execution.run:
            continue  # the size of this one is limited by the process alone
        with pytest.raises(CannotReplay, match=why):
            run(copy.deepcopy(task))


def _long() -> Task:
    return Task("Torch.matrix_power", [torch.ones(2000, 2000), (1 << 20) + 1], {}, 1 << 30)


def test_a_crash_is_an_answer_and_the_next_replay_works():
    replays = worker.Replays()
    replays.run(_tasks()[0])
    pid = worker._worker._process.pid
    threading.Timer(0.5, os.kill, (pid, signal.SIGSEGV)).start()
    with pytest.raises(CannotReplay, match="SIGSEGV"):
        replays.run(_long())
    assert replays.run(_tasks()[0])
    assert worker._worker._process.pid != pid


def test_a_replay_that_takes_too_long_is_ended_and_three_end_all(monkeypatch):
    replays = worker.Replays()
    replays.run(_tasks()[0])
    monkeypatch.setattr(constants, "REPLAY_CRASHES", 1)
    monkeypatch.setattr(constants, "REPLAY_SECONDS", 0.5)
    with pytest.raises(CannotReplay, match="takes longer than"):
        replays.run(_long())
    with pytest.raises(CannotReplay, match="1 replays have"):
        replays.run(_tasks()[0])


def test_an_interrupt_ends_the_replay_and_no_answer_is_taken_for_another(monkeypatch):
    replays = worker.Replays()
    replays.run(_tasks()[0])
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_receive", lambda stream: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replays.run(_tasks()[0])
    (answer,) = replays.run(_tasks()[7])
    assert torch.equal(answer[1], torch.arange(5, dtype=torch.int32))


class _Softmax(nn.Module):
    written_out = False

    def forward(self, x):
        x = x * 0.5
        if self.written_out:
            powers = (x - x.amax(-1, keepdim=True)).exp()
            return powers / (powers.sum(-1, keepdim=True) + 1)
        return torch.softmax(x, -1)


def _recorded(name: str, written_out: bool) -> Path:
    model = nn.Sequential(_Softmax())
    model[0].written_out = written_out
    with ld.dump(model, name=name, mode="module+api") as run:
        model(torch.arange(12.0).reshape(3, 4))
    return Path(run.path)


def _told(golden: Path, mine: Path) -> list[tuple[object, ...]]:
    report = ld.compare(str(golden), str(mine))
    return [(f.path, f.cause, f.evidence, f.advice, f.repro is None) for f in report.findings]


def test_a_run_from_elsewhere_has_the_findings_of_ones_own(monkeypatch):
    both = _recorded("golden", False), _recorded("mine", True)
    own = _told(*both)
    asked = []
    ask = worker._worker.ask
    monkeypatch.setattr(worker._worker, "ask", lambda *a: asked.append(a) or ask(*a))
    assert _told(*both) == own
    assert not asked
    monkeypatch.setattr(live_models, "_recorded_here", {both[0]})
    assert _told(*both) == own
    assert asked


def test_a_hostile_operator_in_a_dump_is_not_run(monkeypatch):
    both = _recorded("golden", False), _recorded("mine", True)
    monkeypatch.setattr(live_models, "_recorded_here", set())
    for path in both:
        db = sqlite3.connect(next(path.rglob("index.sqlite")))
        with db:
            db.execute("UPDATE records SET op = 'Aten._reshape_alias' WHERE op LIKE '%.mul'")
            for slot, text in (("1", "(1000000000,)"), ("2", "(1099511627776,)")):
                db.execute(
                    "INSERT INTO scalars SELECT root_call, path, call, 'input', ?, 'Size', ?, phase"
                    " FROM records WHERE op = 'Aten._reshape_alias' AND role = 'output'",
                    (slot, text),
                )
        db.close()
    assert ld.compare(*map(str, both)).verdict == "diverged"
