"""Runs of several ranks: what is recorded of each, and how the parts make one run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmdebug_nb.core import placement
from llmdebug_nb.core.placement import Placement
from rank_programs import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


# -- what is recorded -----------------------------------------------------------------------------


def test_ranks_that_record_themselves_are_one_run_with_their_groups(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "ddp", ranks=2)
    assert sorted(file.name for file in tmp_path.glob("mine*") if file.is_dir()) == ["mine"]
    assert run.info()["ranks"] == [0, 1]
    assert run.info()["complete"]
    worlds = [process["world"] for process in run.source.processes]
    assert [(world["size"], world["groups"]) for world in worlds] == [(2, [[0, 1]])] * 2
    local, reduced = (
        [run.tensor("head", role="grad", slot=slot, phase="backward", rank=r) for r in (0, 1)]
        for slot in ("weight", "weight reduced")
    )
    assert torch.equal(reduced[0], reduced[1])
    assert not torch.equal(local[0], local[1])
    torch.testing.assert_close(reduced[0], (local[0] + local[1]) / 2)


def test_a_dtensor_is_recorded_as_the_part_of_its_rank_with_its_place(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "tensor_parallel", ranks=2)
    whole = server.record(tmp_path, "whole", name="golden")
    parts = [run.find("layers.0.down", role="weight", slot="weight", rank=r) for r in (0, 1)]
    assert parts[0].placed == Placement((2,), (0, 1), ("tp",), ("shard 1",), (8, 12))
    values = torch.cat([run.load(part) for part in parts], 1)
    assert torch.equal(values, whole.tensor("layers.0.down", role="weight", slot="weight"))
    assert str(run.find("layers.0.down", role="weight", slot="bias").placed) == "tp: replicate"
    gradient = run.find("head", phase="backward", rank=1)
    assert gradient.placed is not None
    assert gradient.placed.parts == ("sum",)
    table = run.to_pandas()
    assert set(table[table["role"] == "weight"]["placed"]) == {
        "tp: shard 0", "tp: shard 1", "tp: replicate",
    }  # fmt: skip
    assert table["lost"].isna().all()


def test_a_collective_is_a_row_with_its_group_at_every_level(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "tensor_parallel", ranks=2)
    path = "layers.0.down/Distributed.all_reduce"
    taken = [run.tensor(path, role="input", rank=rank) for rank in (0, 1)]
    for rank in (0, 1):
        torch.testing.assert_close(run.tensor(path, rank=rank), taken[0] + taken[1])
    facts = run.scalars(path)
    facts = facts[facts["role"] == "collective"].drop_duplicates(["slot", "value"])
    assert dict(zip(facts["slot"], facts["value"], strict=True)) == {"ranks": "0,1", "op": "sum"}
    backward = run.records(phase="backward", path="/Distributed.all_reduce", role="output")
    assert sorted({record.site.rank for record in backward}) == [0, 1]


def test_fully_sharded_weights_gradients_and_collectives_are_recorded(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "fsdp", ranks=2)
    whole = server.record(tmp_path, "whole", name="golden")
    for role, slot, phase in (("weight", "weight", "forward"), ("grad", "weight", "backward")):
        own = slot if role == "weight" else f"{slot} reduced"
        parts = [run.tensor("head", role=role, slot=own, phase=phase, rank=r) for r in (0, 1)]
        there = whole.tensor("head", role=role, slot=slot, phase=phase)
        torch.testing.assert_close(torch.cat(parts), there)
    ops = {record.op for record in run.records() if "/Distributed." in record.site.path}
    assert {op.partition(".")[2].partition("_s")[0] for op in ops} == {"all_gather", "reduce"}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[[2],[0,1],[\"tp\"],[\"shard 0\",\"sum\"],[4]]",
        "[[2],[0,0],[\"tp\"],[\"shard 0\"],[4]]",
        "[[2],[0],[\"tp\"],[\"shard 0\"],[4]]",
        "[[2],[0,1],[\"tp\"],[\"shard 1\"],[4]]",
        "[[2],[0,1],[\"tp\"],[\"exec\"],[4]]",
        "[[0],[],[\"tp\"],[\"sum\"],[4]]",
    ],
)  # fmt: skip
def test_a_damaged_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"placement|mesh|holds|hold|axes"):
        placement.read(text)


def test_a_place_in_a_mesh_counts_row_by_row() -> None:
    placed = Placement((2, 2), (4, 5, 6, 7), ("dp", "tp"), ("replicate", "shard 0 in 2"), (8,))
    assert [placed.at(rank) for rank in (4, 5, 6, 7, 0)] == [(0, 0), (0, 1), (1, 0), (1, 1), None]
    assert placement.read(placed.as_json()) == placed
