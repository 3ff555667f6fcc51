"""What a recording of llama.cpp keeps from pass to pass, and how long it holds a result."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sqlite3
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from fake_ggml import Fake, installed
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.compat.ggml_tensors import Tensor
from llmdebug_nb.capture.engines.ggml_axes import Shape
from llmdebug_nb.capture.engines.ggml_graph import Graph, GraphNode, NodeKey
from llmdebug_nb.capture.engines.ggml_plan import Plan, Planned, fields_of
from llmdebug_nb.capture.engines.ggml_results import Results
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.columns import AT
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.store.writer import Writer, create_run

SHAPE = Shape((1, 1, 1, 1), (4, 4, 4, 4))


def planned(plan: Plan, tensor: Tensor, base: int | None = None) -> Planned:
    address = ctypes.addressof(tensor)
    key = plan.key(tensor.name.decode(), "MUL", ())
    fields = fields_of(address)
    return plan.add(
        Planned(
            address, fields, key, {}, SHAPE, base or address, frozenset(), base is None
        )
    )  # fmt: skip


@given(st.integers(0, 5), st.booleans())
def test_a_plan_is_followed_up_to_the_first_node_that_differs(changed: int, moved: bool) -> None:
    tensors = [Tensor(name=b"Qcur-0", data=at) for at in range(1, 7)]
    plan = Plan()
    first = [planned(plan, tensor) for tensor in tensors]
    plan.begin()
    assert [plan.next(node.address) for node in first] == first
    assert plan.next(first[0].address) is None  # this pass has more nodes than the plan

    other = Tensor.from_buffer_copy(tensors[changed])
    if not moved:
        tensors[changed].data = 99
    plan.begin()
    for at, tensor in enumerate(tensors):
        address = ctypes.addressof(other if moved and at == changed else tensor)
        found = plan.next(address)
        assert found is (first[at] if at < changed else None)
        if found is None:
            again = planned(plan, Tensor.from_address(address))
            # a name counts on behind the nodes that stayed
            assert again.key == NodeKey("Qcur-0", "MUL", at)
    assert len(plan.nodes) == len(tensors)


def test_a_view_of_a_view_belongs_to_the_node_whose_values_it_shows() -> None:
    plan, tensors = Plan(), [Tensor(name=name) for name in (b"x", b"x (view)", b"x (view) (view)")]
    node = planned(plan, tensors[0])
    for tensor, seen in zip(tensors[1:], tensors, strict=False):
        planned(plan, tensor, plan.base(ctypes.addressof(seen)))
    assert plan.base(ctypes.addressof(tensors[2])) == node.address
    assert plan.base(7) == 7


def test_readers_are_the_nodes_that_read_a_result_each_counted_once() -> None:
    x, y, z = (NodeKey(name, "MUL", 0) for name in "xyz")
    nodes = [GraphNode(x, (), {}), GraphNode(y, (x, x), {}), GraphNode(z, (x, y), {})]
    assert Graph(nodes).readers == {x: 2, y: 1}


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Writer(create_run(tmp_path, "run", {})), DumpOptions(stats_only=True))


def test_a_result_is_let_go_once_its_last_reader_is_computed(recorder: Recorder) -> None:
    results = Results(recorder)
    values = torch.ones(3)
    held = weakref.ref(values.untyped_storage())
    results.add(1, values, 2)
    results.add(2, torch.zeros(3), None)
    del values
    for _ in range(2):
        results.read([1, 77])
        assert results[1] is not None  # the reader is not computed yet
    results.read([2])
    gc.collect()
    assert (1 in results, results[1], held()) == (True, None, None)
    assert results[2] is not None  # nobody knows who reads it


def test_modules_alone_have_the_rows_that_they_have_beside_their_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch)
    found = []
    for name, apis in (("all", "*"), ("modules", "!*"), ("norms", "Ggml.RMS_NORM")):
        engine = Fake()
        read: list[str] = []
        values = engine.library.values
        monkeypatch.setattr(
            engine.library, "values", lambda x, v=values, r=read: (r.append(x.name), v(x))[1]
        )
        with ld.dump(engine, name=name, path=tmp_path, tokens="all", apis=apis) as run:
            engine.eval([3, 1, 4])
            engine.eval([9])
        rows = [
            (site.step, site.path, site.call, site.role, site.slot, str(record.summary))
            for record in run.records()
            for site in [record.site]
        ]
        found.append((rows, {path for _, path, *_ in rows if "/" in path}, len(read)))
    (every, nodes, all_read), (modules, none, few_read), (norms, some, _) = found
    assert modules == [row for row in every if "/" not in row[1]]
    assert [row for row in norms if "/" not in row[1]] == modules
    assert (none, some) == (set(), {path for path in nodes if path.endswith("RMS_NORM")})
    assert few_read < all_read


# -- tensors that were promised to stay as they are -----------------------------------------------


def rows_of(
    place: Path, tensors: list[torch.Tensor], settled: bool, **options: object
) -> list[tuple[object, ...]]:
    """Record an output, then an input and an output of another call, of each tensor."""
    folder = create_run(place, f"run-{settled}", {})
    sink = Writer(folder)
    made = Recorder(sink, DumpOptions(**options))  # type: ignore[arg-type]
    for number, tensor in enumerate(tensors):
        if settled:
            made.settle(tensor)
        first, second = (OpenCall(f"{x}{number}", "Op", "module", None, 0, 0) for x in "ab")
        for call, role in ((first, "output"), (second, "input"), (second, "output")):
            made.record_tensor(call, role, "0", tensor)
    made.end_call([RootCall(0)])
    sink.close({"complete": True})
    index = next(folder.rglob("index.sqlite"))
    with contextlib.closing(sqlite3.connect(index)) as db:
        return db.execute("SELECT * FROM records").fetchall()


@pytest.mark.parametrize("options", [{}, {"stats_only": True}, {"slice": "0"}])
def test_a_settled_tensor_has_the_rows_that_it_has_otherwise(
    tmp_path: Path, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(5, 7), torch.randn(300, 100), torch.randn(6, 4).t(), torch.arange(6),
        torch.tensor([1.0, float("nan"), float("inf")]), torch.randn(2, 3).half(), torch.ones(0, 4),
    ]  # fmt: skip
    found = [rows_of(tmp_path, tensors, settled, **options) for settled in (False, True)]
    assert len(found[0]) == 3 * len(tensors)
    assert found[0] == found[1]


def test_the_storage_of_a_settled_tensor_is_no_other_tensors_as_long_as_the_root_call_runs(
    recorder: Recorder,
) -> None:
    call = OpenCall("a", "Op", "module", None, 0, 0)
    for _ in range(50):
        values = torch.ones(64)
        recorder.settle(values)
        recorder.record_tensor(call, "output", "0", values)
        recorder.unsettle(values)
        del values
        # takes the memory, and the number, that were given back
        recorder.record_tensor(call, "input", "0", torch.zeros(64))
    producers = [row[AT["producer"]] for row in recorder.hand.records if row[AT["role"]] == "input"]
    assert producers == [None] * 50
