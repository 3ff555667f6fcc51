"""Runs of several ranks: what is recorded of each, and how the parts make one run."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.capture.ranks import NOT_WAITED
from llmdebug_nb.cli import main
from llmdebug_nb.comparison.collectives import fault
from llmdebug_nb.core import constants, placement
from llmdebug_nb.core.errors import CompareError
from llmdebug_nb.core.kernels.joining import Recipe, joined
from llmdebug_nb.core.placement import Mirrored, Placement, Shard
from llmdebug_nb.core.records import Site
from llmdebug_nb.show import filters
from llmdebug_nb.show.run_view import RunView
from llmdebug_nb.store.rank_checks import Collective
from llmdebug_nb.store.run import Run
from llmdebug_nb.store.spread import _totals
from llmdebug_nb.store.world import _grid
from rank_programs import Server
from recordings import change_index
from view_requests import rows_request


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


def test_what_an_asynchronous_collective_gives_is_recorded_when_the_program_waits_for_it(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "asynchronous", ranks=2)
    summed, gathered = (f"layers.0/Distributed.{name}" for name in ("all_reduce", "all_gather"))
    taken = [run.tensor(summed, role="input", rank=rank) for rank in (0, 1)]
    for rank in (0, 1):
        assert torch.equal(run.tensor(summed, rank=rank), taken[0] + taken[1])
        for at in (0, 1):
            assert torch.equal(run.tensor(gathered, slot=str(at), rank=rank), taken[at])
        assert [each.site.call for each in run.records(path=summed, role="output", rank=rank)] == [
            0
        ]
    lost = [process["lost"] for process in run.source.processes]
    assert lost == [{NOT_WAITED: 1}] * 2
    assert ld.check_ranks(run).ok


def test_messages_between_ranks_are_recorded_with_what_was_sent_and_received(
    server: Server, tmp_path: Path
) -> None:
    run = server.record(tmp_path, "messages", ranks=2)
    for rank in (0, 1):
        sent, got = (
            [
                record
                for record in run.records(path=f"/Distributed.{end}", role=role)
                if record.site.rank == where
            ]
            for end, role, where in (("send", "input", rank), ("recv", "output", 1 - rank))
        )
        assert len(sent) == len(got) == 3
        assert all(torch.equal(run.load(a), run.load(b)) for a, b in zip(sent, got, strict=True))
    found = ld.check_ranks(run)
    assert found.ok
    assert (found.collectives, found.unchecked) == (6, {})
    assert run.info()["lost"] == 0


def test_a_message_that_is_not_what_was_sent_is_named(server: Server, tmp_path: Path) -> None:
    found = ld.check_ranks(server.record(tmp_path, "messages", "garbled", ranks=2))
    assert {fault.ranks for fault in found.faults} == {(1,)}
    assert len(found.faults) == 3
    assert "rank 1 has another result than what its ranks put in (error 0.25)" in str(found)


def test_messages_that_one_rank_did_not_record_are_counted_and_no_fault(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "one_way", ranks=2, tokens="0-1"))
    assert found.ok
    assert found.collectives > 0
    assert sum(found.unchecked.values()) > 0


def test_passes_that_are_not_reduced_are_no_replicas(server: Server, tmp_path: Path) -> None:
    found = ld.check_ranks(server.record(tmp_path, "halves", ranks=2))
    assert found.ok, str(found)


def test_sparse_gradients_leave_those_of_other_layers(server: Server, tmp_path: Path) -> None:
    run = server.record(tmp_path, "sparse", ranks=2)
    slots = {record.site.slot for record in run.records(path="1", role="grad")}
    assert {"weight reduced", "weight accumulated"} <= slots
    assert [process["problems"] for process in run.source.processes] == [{}, {}]


def test_a_group_written_in_python_works_while_messages_are_watched(
    server: Server, tmp_path: Path
) -> None:
    assert server.record(tmp_path, "own_group", ranks=2).info()["complete"]


def test_what_was_accumulated_since_an_earlier_step_stands_for_no_step() -> None:
    def noted(step: int, slot: str) -> Any:
        return SimpleNamespace(id=step, site=Site("f", step, role="grad", slot=slot))

    slots = ["weight reduced", *["weight accumulated"] * 3]
    whole = {(0, 0): (0, 0), (0, 1): (0, 0), (0, 2): (0, 1), (0, 3): (0, 1)}
    records = [(whole[0, at], noted(at, slot)) for at, slot in enumerate(slots)]
    totals, _ = _totals({0: records}, whole)
    found = {step: [r.id for r in ranks[0]] for step, ranks in totals.items() if ranks}
    assert found == {(0, 0): [1]}


def test_an_alarm_of_one_rank_keeps_the_last_steps_of_all(server: Server, tmp_path: Path) -> None:
    options = {"last": 3, "alarm": "nan", "stats_only": True, "weights": False}
    run = server.record(tmp_path, "spoilt", ranks=2, **options)
    kept: dict[int, set[int]] = {0: set(), 1: set()}
    for record in run.records():
        kept[record.site.rank].add(record.site.step)
    assert kept[1] == {2, 3, 4, 5, 9, 10, 11}
    assert 5 in kept[0]  # rank 0 hears of it at the end of its own step 5 or 6
    reasons = [alarm.reason for alarm in run.alarms()]
    assert any("NaN in the model input[0]" in reason for reason in reasons)
    assert "rank 1 raised an alarm in its step 5" in reasons
    assert len(reasons) == 2
    assert run.info()["complete"]


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
    ("program", "ranks"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("asynchronous", 2),
        ("messages", 2),
        ("tensor_parallel", 2),
        ("manual", 2),
        ("two_dimensions", 4),
    ],
)
def test_recording_changes_no_bit_of_what_ranks_compute(
    server: Server, tmp_path: Path, program: str, ranks: int
) -> None:
    unrecorded = server.results(tmp_path, program, "", ranks)
    recorded = server.results(tmp_path, program, "mine", ranks)
    assert len(recorded) == len(unrecorded) > ranks
    assert all(torch.equal(a, b) for a, b in zip(recorded, unrecorded, strict=True))
    run = ld.open_run(tmp_path / "mine")
    assert [process["problems"] for process in run.source.processes] == [{}] * ranks


def test_torchrun_records_placements_in_an_unedited_program(tmp_path: Path) -> None:
    here = Path(__file__).parent
    program = tmp_path / "train.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "import rank_programs, torch.distributed as dist, torch.distributed.tensor.parallel\n"
        "dist.init_process_group('gloo')\n"
        "rank_programs.tensor_parallel(dist.get_rank(), 2)\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    command = f"torchrun --standalone --nproc-per-node 2 {program}"
    done = ld.launch(command, name="tp", path=tmp_path, weights=True)
    assert done.status == 0
    run = done.run
    assert run.info()["ranks"] == [0, 1]
    worlds = [process["world"] for process in run.source.processes]
    assert worlds[0]["job"] == worlds[1]["job"] != ""
    assert str(run.find("layers.0.down", role="weight", rank=1).placed) == "tp: shard 1"
    assert ld.check_ranks(run).ok


# -- one rank of several --------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program of several ranks, and the program that it computes the same as."""

    program: str
    args: tuple[object, ...] = ()
    golden: str = "whole"
    golden_args: tuple[object, ...] = ()
    ranks: int = 2
    warmup: int = 0

    def golden_of(self, server: Server, folder: Path) -> Run:
        return server.record(folder, self.golden, *self.golden_args, name="golden")

    def mine_of(self, server: Server, folder: Path, bug: str | None = None) -> Run:
        args = self.args[:1] if self.program == "hugging_face" else ()
        args = (*args, bug, *self.args[len(args) :])
        return server.record(folder, self.program, *args, ranks=self.ranks, warmup=self.warmup)


CASES = {
    "DDP": Case("ddp"),
    "FSDP2": Case("fsdp"),
    "tensor parallel": Case("tensor_parallel"),
    "FSDP2 over tensor parallel": Case("two_dimensions", ranks=4),
    "plain weights divided by hand": Case("manual"),
    "pipeline": Case("pipeline", warmup=1),
    "pipeline with layers of its own numbers": Case("pipeline", (True,), warmup=1),
    "micro-batches": Case("micro_batches", ranks=1),
    "FSDP2 that reduces each micro-batch": Case("accumulates", ("fsdp each",)),
    "FSDP2 that reduces once": Case("accumulates", ("fsdp once",)),
    "DDP that reduces each micro-batch": Case("accumulates", ("ddp each",)),
    "DDP that reduces once": Case("accumulates", ("ddp once",)),
    "context parallel": Case("context_parallel", (), "of_sequences", (True,)),
    "sequence parallel": Case("sequence_parallel", (), "of_sequences", (False,)),
    "expert parallel": Case("expert_parallel", (), "of_experts"),
    "expert parallel with experts of its own numbers": Case(
        "expert_parallel", (True,), "of_experts"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_several_ranks_agrees_with_the_one_of_one_rank(
    server: Server, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    golden = case.golden_of(server, tmp_path)
    report = ld.compare(golden, case.mine_of(server, tmp_path))
    assert report.verdict in ("match", "within_noise")
    found = report.coverage
    assert (found.values_matched, found.rejoined) == (found.values, 0)
    assert found.observables_matched == found.observables > 0
    assert not any("left out" in note for note in report.notes())
    table = report.to_pandas()
    there = table[table["golden_shape"].notna()]
    assert set(there["verdict"]) <= {"match", "within_noise"}
    assert len(there) == len(golden)


@pytest.mark.parametrize("how", ["fsdp once", "fsdp each", "ddp once", "ddp each"])
def test_gradients_that_both_programs_accumulate_are_no_difference(
    server: Server, tmp_path: Path, how: str
) -> None:
    golden = server.record(tmp_path, "micro_batches", None, 3, name="golden")
    report = ld.compare(golden, server.record(tmp_path, "accumulates", None, how, 3, ranks=2))
    assert report.verdict == "within_noise"
    assert not report.findings


def test_tp_plan_of_transformers_agrees_with_the_whole_model(
    server: Server, tmp_path: Path
) -> None:
    folder = str(tmp_path / "llama")
    golden = server.record(tmp_path, "hugging_face", folder, name="golden")
    mine = server.record(tmp_path, "hugging_face", folder, ranks=2)
    report = ld.compare(golden, mine)
    assert report.verdict in ("match", "within_noise")
    assert report.coverage.values_matched == report.coverage.values > 0


@pytest.mark.parametrize("name", [name for name in CASES if name != "micro-batches"])
def test_a_stale_part_is_found_and_its_rank_is_named(
    server: Server, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    golden = case.golden_of(server, tmp_path)
    report = ld.compare(golden, case.mine_of(server, tmp_path, "stale"))
    assert report.verdict == "diverged"
    first = report.findings[0]
    where = {"of_experts": "0.router", "of_sequences": "layers.1."}
    assert first.path.startswith(where.get(case.golden, "layers.1.up"))
    assert first.cause == "weight differs"
    if "pipeline" not in name:  # there, no other rank has the module
        assert f"rank {case.ranks - 1} of {case.ranks} alone" in first.evidence


@pytest.mark.parametrize("bug", ["mean", "op"])
def test_another_reduction_is_found_where_it_is_made(
    server: Server, tmp_path: Path, bug: str
) -> None:
    case = CASES["plain weights divided by hand"]
    report = ld.compare(case.golden_of(server, tmp_path), case.mine_of(server, tmp_path, bug))
    assert report.verdict == "diverged"
    assert report.findings[0].path == "layers.1.down"
    assert "alone" not in report.findings[0].evidence  # all ranks have it


def test_micro_batches_that_nothing_averages_are_said(server: Server, tmp_path: Path) -> None:
    case = CASES["micro-batches"]
    golden = case.golden_of(server, tmp_path)
    said = [
        [note for note in ld.compare(golden, mine).notes() if "as the mean over" in note]
        for mine in (
            case.mine_of(server, tmp_path),
            server.record(tmp_path, "micro_batches", "sum", name="sum"),
        )
    ]
    assert [len(each) for each in said] == [0, 1]


def test_a_joined_run_is_read_like_any_other(server: Server, tmp_path: Path) -> None:
    mine = server.record(tmp_path, "tensor_parallel", ranks=2)
    golden = server.record(tmp_path, "whole", name="golden")
    whole = ld.compare(golden, mine).mine
    assert whole.info()["ranks"] == [0]
    assert torch.equal(whole.tensor("head", role="weight"), golden.tensor("head", role="weight"))
    record = whole.find("layers.0.up")
    there = golden.find("layers.0.up").summary
    assert record.summary.shape == there.shape
    assert record.summary.l2norm == pytest.approx(there.l2norm)
    assert [node.path for node in whole.nodes] == [node.path for node in golden.nodes]
    assert len(whole.steps()) == 1
    # nothing was written, and the run of the ranks is as it was
    assert mine.find("layers.0.up", rank=1).summary.shape == (8, 6)


def test_a_joined_run_is_measured_on_a_cluster_with_the_same_result(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(constants, "BATCH_JOBS", 2)
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "tensor_parallel", "stale", ranks=2)
    here = ld.compare(golden, mine)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0",
        silence_logs=50, protocol="tcp://",
    ) as cluster:  # fmt: skip
        there = ld.compare(golden, mine, cluster=cluster.scheduler_address, progress=False)
    rows = [
        [(d.verdict, d.error, d.limit, d.metrics) for d in r.differences] for r in (here, there)
    ]
    assert rows[1] == rows[0]
    assert here.verdict == "diverged"
    assert [str(finding) for finding in there.findings] == [str(each) for each in here.findings]
    assert there.problems == here.problems  # no task was done in this process


def test_runs_of_as_many_ranks_are_compared_rank_by_rank_and_the_rank_is_named(
    server: Server, tmp_path: Path
) -> None:
    golden = server.record(tmp_path, "ddp", ranks=2, name="golden")
    assert ld.compare(golden, server.record(tmp_path, "ddp", ranks=2)).verdict == "match"
    report = ld.compare(golden, server.record(tmp_path, "ddp", "stale", ranks=2, name="stale"))
    # gradients that both ranks share differ on rank 0, too, where nothing is wrong
    assert report.findings[0].path == "layers.1.up"
    assert report.findings[0].cause == "weight differs"
    assert report.findings[0].evidence.endswith("on rank 1 of 2")


def test_runs_of_as_many_ranks_that_divide_otherwise_are_put_together(
    server: Server, tmp_path: Path
) -> None:
    golden = server.record(tmp_path, "ddp", ranks=2, name="golden")
    report = ld.compare(golden, server.record(tmp_path, "tensor_parallel", ranks=2))
    assert report.verdict in ("match", "within_noise")
    assert report.coverage.observables_matched == 10  # the gradients that DDP shares


def test_the_loss_of_parts_of_a_batch_is_their_mean(server: Server, tmp_path: Path) -> None:
    golden = server.record(tmp_path, "whole", name="golden", mode="api")
    report = ld.compare(golden, server.record(tmp_path, "ddp", ranks=2, mode="api"))
    assert report.verdict in ("match", "within_noise")
    table = report.to_pandas()
    assert set(table[table["path"] == "/Tensor.mean"]["verdict"]) <= {"match", "within_noise"}


def test_statistics_of_a_whole_tensor_follow_from_those_of_its_parts(
    server: Server, tmp_path: Path
) -> None:
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "tensor_parallel", ranks=2, stats_only=True)
    whole = ld.compare(golden, mine).mine.find("layers.0.up")
    there = golden.find("layers.0.up").summary
    assert whole.payload is None
    for name in ("min", "max", "mean", "l2norm"):
        assert getattr(whole.summary, name) == pytest.approx(getattr(there, name), rel=1e-5), name
    assert (whole.summary.zero, whole.summary.nan) == (there.zero, there.nan)


def test_the_explorer_lists_the_rows_of_a_rank_and_offers_those_that_there_are(
    server: Server, tmp_path: Path
) -> None:
    golden = server.record(tmp_path, "ddp", ranks=2, name="golden")
    mine = server.record(tmp_path, "ddp", "stale", ranks=2)

    def listed(text: str) -> list[int]:
        found = mine.index.matching(filters.read(text))
        return [mine.record(number).site.rank for number in found]

    assert set(listed("rank:1")) == {1}
    assert len(listed("rank:1")) == len(listed("rank:0")) == len(mine) / 2
    assert len(listed("rank:0 rank:1 head")) == len(listed("head"))
    assert listed("rank:7") == []
    report = ld.compare(golden, mine)
    page = report.view().rows(rows_request(every=True, step=0, n=99, text="rank:1 up"))
    assert {report.differences[row["id"]].site.rank for row in page["rows"]} == {1}
    assert report.view().overview()["ranks"] == RunView(mine).overview()["ranks"] == [0, 1]
    whole = server.record(tmp_path, "whole", name="whole")
    assert RunView(whole).overview()["ranks"] == []
    assert "as in rank:1" in filters.problem("rank:x")


# -- ranks against each other ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.ranks > 1 and not case.warmup]
)
def test_ranks_of_a_right_program_agree(server: Server, tmp_path: Path, name: str) -> None:
    found = ld.check_ranks(CASES[name].mine_of(server, tmp_path))
    assert found.ok, str(found)
    assert found.replicas + found.collectives > 0
    assert not found.unchecked


@pytest.mark.parametrize(
    ("name", "path"), [("DDP", "layers.1.up"), ("expert parallel", "0.router")]
)
def test_a_replica_that_is_out_of_step_is_named(
    server: Server, tmp_path: Path, name: str, path: str
) -> None:
    found = ld.check_ranks(CASES[name].mine_of(server, tmp_path, "stale"))
    (only,) = found.faults
    assert (only.kind, only.site.path, only.site.role) == ("out of step", path, "weight")
    assert only.ranks == (0, 1)  # of two, each may be the stale one
    assert "should be equal and differ by 0.2" in only.says


def test_of_four_replicas_the_one_that_differs_is_named(server: Server, tmp_path: Path) -> None:
    found = ld.check_ranks(server.record(tmp_path, "ddp", "stale", ranks=4))
    (only,) = found.faults
    assert only.ranks == (1,)
    assert only.says == "rank 1 differs by 0.2 from the 3 others"


@pytest.mark.parametrize(
    ("bug", "ranks", "says"),
    [
        ("averages", (0, 1), "than the sum of its inputs (error 0.5): it is their mean"),
        ("missing", (0, 1), ": the part of rank 1 is not in it"),
        ("late", (1,), "rank 1 has another result than the sum of its inputs (error 0.25)"),
    ],
)
def test_a_collective_that_does_not_give_what_was_put_in_is_named(
    server: Server, tmp_path: Path, bug: str, ranks: tuple[int, ...], says: str
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "manual", bug, ranks=2))
    wrong = [fault for fault in found.faults if fault.kind == "wrong result"]
    assert [fault.site.path for fault in wrong] == [
        "layers.0.down/Distributed.all_reduce", "layers.1.down/Distributed.all_reduce",
        "/Distributed.all_reduce",
    ]  # fmt: skip
    assert {fault.ranks for fault in wrong} == {ranks}
    assert all(says in fault.says for fault in wrong)


@pytest.mark.parametrize("how", ["once", "each"])
def test_gradients_that_ddp_reduces_are_held_against_what_ranks_added(
    server: Server, tmp_path: Path, how: str
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "accumulates", None, f"ddp {how}", ranks=2))
    assert found.ok, str(found)
    assert found.collectives == 10 * (1 if how == "once" else 2)  # parameters that were reduced
    assert not found.unchecked


def test_gradients_that_are_filled_with_zeros_are_no_fault(server: Server, tmp_path: Path) -> None:
    found = ld.check_ranks(server.record(tmp_path, "zeroed", ranks=2))
    assert found.ok, str(found)
    # parameters and passes, and the hook's own
    assert (found.collectives, found.unchecked) == (44, {})


@pytest.mark.parametrize("how", ["means", "sums", "in bfloat16"])
def test_a_program_may_reduce_gradients_in_its_own_way(
    server: Server, tmp_path: Path, how: str
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "hooked", how, ranks=2))
    assert found.ok, str(found)
    assert (found.collectives, found.unchecked) == (11, {})  # with that of the hook


def test_gradients_that_lack_the_part_of_a_rank_are_named(server: Server, tmp_path: Path) -> None:
    found = ld.check_ranks(server.record(tmp_path, "hooked", "without rank 1", ranks=2))
    assert len(found.faults) == 10  # parameters
    assert {fault.kind for fault in found.faults} == {"wrong result"}
    assert all(": the part of rank 1 is not in it" in fault.says for fault in found.faults)
    one = ld.check_ranks(
        server.record(tmp_path, "hooked", "one without rank 1", name="one", ranks=2)
    )
    (only,) = one.faults
    assert only.site.slot.endswith(" reduced")
    assert "another result than the mean of its inputs" in only.says


def test_gradients_that_are_reduced_in_an_unknown_way_are_counted(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "hooked", "signs", ranks=2))
    assert found.ok
    assert found.collectives == 1  # the hook's
    assert sum(found.unchecked.values()) == 10
    few = ld.check_ranks(server.record(tmp_path, "ddp", ranks=2, name="few", stats_only=True))
    assert few.unchecked == {"gradients without values": 10}


def call(name: str, gives: list[list[float]], takes: list[list[float]], **facts: str) -> Collective:
    """Return a collective of as many ranks as there are results."""
    said = {rank: {"ranks": "0,1", **facts} for rank in range(len(gives))}
    sides = ({r: [torch.tensor(x)] for r, x in enumerate(each)} for each in (takes, gives))
    return Collective(Site("f"), name, said, *sides)


@pytest.mark.parametrize(
    ("op", "facts", "gives"),
    [
        ("all_reduce", {"op": "sum"}, [[6.0, 8.0]] * 2),
        ("all_reduce", {"op": "avg"}, [[3.0, 4.0]] * 2),
        ("all_reduce", {"op": "max"}, [[5.0, 6.0]] * 2),
        ("all_gather_into_tensor", {}, [[1.0, 2.0, 5.0, 6.0]] * 2),
        ("reduce_scatter_tensor", {"op": "sum"}, [[6.0], [8.0]]),
        ("broadcast", {"src": "1"}, [[5.0, 6.0]] * 2),
        ("all_to_all_single", {}, [[1.0, 5.0], [2.0, 6.0]]),
    ],
)
def test_what_a_collective_gives_is_computed_from_what_it_takes(
    op: str, facts: dict[str, str], gives: list[list[float]]
) -> None:
    takes = [[1.0, 2.0], [5.0, 6.0]]
    assert fault(call(op, gives, takes, **facts)) is None
    wrong = fault(call(op, [gives[0], [x + 1 for x in gives[1]]], takes, **facts))
    assert wrong is not None
    assert wrong.ranks == (1,)


def test_nan_and_infinities_are_no_fault_where_they_belong() -> None:
    nan, inf = math.nan, math.inf
    takes = [[1.0, nan, inf, 2.0], [5.0, 1.0, 1.0, -3.0]]
    right = [6.0, nan, inf, -1.0]
    assert fault(call("all_reduce", [right] * 2, takes, op="sum")) is None
    for place, instead in ((1, 1.0), (2, nan), (2, -inf), (0, nan), (3, 5.0)):
        wrong = [*right]
        wrong[place] = instead
        assert fault(call("all_reduce", [right, wrong], takes, op="sum")) is not None


def test_gradients_of_parameters_that_each_rank_has_a_part_of_are_no_replicas(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "divided", ranks=2))
    assert found.ok, str(found)


def test_what_was_not_reduced_is_found_where_gradients_are_filled_with_zeros(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "zeroed", "local", ranks=2))
    assert {fault.kind for fault in found.faults} == {"out of step"}
    assert {fault.site.step for fault in found.faults} == {1}


def test_sparse_gradients_and_ranks_that_have_joined_are_counted_as_not_checked(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "sparsely", ranks=2))
    assert found.ok, str(found)
    assert any("sparse" in why for why in found.unchecked)
    joined = ld.check_ranks(server.record(tmp_path, "uneven", ranks=2, name="joined"))
    assert joined.ok, str(joined)
    assert any("not all ranks" in why for why in joined.unchecked)


@pytest.mark.parametrize(
    ("bug", "ranks", "says"),
    [
        (None, 2, ""),
        ("local", 2, "ranks 0, 1 changed the weight in 2 ways"),
        ("rate", 4, "rank 1 changed the weight otherwise than the 3 others"),
        ("frozen", 2, "ranks 0, 1 changed the weight in 2 ways"),
    ],
)
def test_weights_that_ranks_change_otherwise_are_named_with_the_step(
    server: Server, tmp_path: Path, bug: str | None, ranks: int, says: str
) -> None:
    golden = server.record(tmp_path, "learns", name="golden")
    mine = server.record(tmp_path, "learns", bug, ranks=ranks)
    report, found = ld.compare(golden, mine), ld.check_ranks(mine)
    if bug is None:
        assert found.ok, str(found)
        assert report.verdict == "within_noise"
        return
    (only,) = found.faults
    assert (only.kind, only.site.role, only.site.step) == ("out of step", "weight", 2)
    assert says in only.says
    assert "so with 9 more weights" in only.says
    assert report.verdict == "diverged"
    (first, *_) = report.findings
    assert first.step == 2
    if bug != "frozen":  # no sample says that it did not change
        assert first.cause == "weight changed otherwise"


def test_ranks_that_never_reduce_are_named_at_the_first_step_that_shows_it(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "learns", "never", ranks=2))
    (only,) = found.faults
    assert (found.verdict, only.site.role, only.site.step) == ("do not agree", "weight", 1)
    assert "a gradient was not reduced" in only.says


def test_experts_that_begin_alike_and_go_their_own_ways_are_no_fault(
    server: Server, tmp_path: Path
) -> None:
    found = ld.check_ranks(server.record(tmp_path, "expert_parallel", ranks=2))
    assert not found.faults, str(found)


def test_ranks_of_which_nothing_was_checked_do_not_agree(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = server.record(tmp_path, "learns", "never", ranks=2, tokens="0", weights=False)
    found = ld.check_ranks(run)
    assert (found.verdict, found.ok, found.replicas, found.collectives) == (
        "nothing checked", False, 0, 0,
    )  # fmt: skip
    assert main(["ranks", str(run.path)]) == 2
    assert "were not held against each other" in capsys.readouterr().out


def test_ranks_that_reduce_otherwise_are_named_and_unknown_calls_are_no_answer() -> None:
    summed = call("all_reduce", [[6.0]] * 2, [[1.0], [5.0]], op="sum")
    summed.facts[1]["op"] = "max"  # type: ignore[index]
    found = fault(summed)
    assert found is not None
    assert found.says == "its ranks reduce otherwise (rank 0: sum, rank 1: maximum)"
    with pytest.raises(ValueError, match="calls of scatter"):
        fault(call("scatter", [[6.0]] * 2, [[1.0], [5.0]]))
    with pytest.raises(ValueError, match="reductions by bxor"):
        fault(call("all_reduce", [[6.0]] * 2, [[1.0], [5.0]], op="bxor"))


def test_the_command_prints_faults_and_says_so_by_its_status(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = server.record(tmp_path, "ddp", "stale", ranks=2)
    assert main(["ranks", str(mine.path)]) == 1
    assert "ranks 0, 1 should be equal and differ by 0.2" in capsys.readouterr().out
    assert main(["ranks", str(mine.path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["path"] == "layers.1.up"
    golden = server.record(tmp_path, "whole", name="golden")
    assert main(["ranks", str(golden.path)]) == 3
    assert "has one rank" in capsys.readouterr().err


# -- bad input ------------------------------------------------------------------------------------


def without_rank(rank: int, run: ld.Run) -> ld.Run:
    """Return a run whose folder of one rank is lost."""
    assert run.path is not None
    (folder,) = run.path.glob(f"rank{rank}_*")
    shutil.rmtree(folder)
    return ld.open_run(run.path)


def test_a_missing_rank_is_named(server: Server, tmp_path: Path) -> None:
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "two_dimensions", ranks=4)
    mine = without_rank(2, mine)
    with pytest.raises(CompareError, match=r"3 of 4 ranks: 2 is missing; record all ranks"):
        ld.compare(golden, mine)


def test_ranks_of_two_programs_in_one_folder_are_refused(server: Server, tmp_path: Path) -> None:
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "tensor_parallel", ranks=2)
    other = server.record(tmp_path, "two_dimensions", ranks=4, name="other")
    assert mine.path is not None
    assert other.path is not None
    (moved,) = other.path.glob("rank3_*")
    shutil.copytree(moved, mine.path / moved.name)
    with pytest.raises(CompareError, match=r"several programs \(of 2, 4 ranks\)"):
        ld.compare(golden, ld.open_run(mine.path))
    shutil.rmtree(mine.path / moved.name)
    (first,) = mine.path.glob("rank0_*")
    shutil.copytree(first, mine.path / "rank0_1")
    with pytest.raises(CompareError, match="several processes of rank 0"):
        ld.compare(golden, ld.open_run(mine.path))


def test_one_rank_of_several_is_said(server: Server, tmp_path: Path) -> None:
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "tensor_parallel", ranks=2)
    mine = without_rank(1, mine)
    notes = ld.compare(golden, mine).notes()
    assert any("rank 0 of 2 alone was recorded" in note for note in notes)


def test_groups_that_are_no_groups_are_refused(server: Server, tmp_path: Path) -> None:
    golden = server.record(tmp_path, "whole", name="golden")
    mine = server.record(tmp_path, "tensor_parallel", ranks=2)
    assert mine.path is not None
    (process,) = mine.path.glob("rank1_*")
    text = json.dumps({"size": 2, "groups": [[0, "; DROP"]]})
    change_index(process, "UPDATE meta SET value = ? WHERE key = 'world'", text)
    with pytest.raises(CompareError, match="the groups of its ranks are damaged"):
        ld.compare(golden, ld.open_run(mine.path))


def test_runs_of_two_and_of_four_ranks_are_compared_as_far_as_placements_say(
    server: Server, tmp_path: Path
) -> None:
    golden = server.record(tmp_path, "tensor_parallel", ranks=2, name="golden")
    mine = server.record(tmp_path, "tensor_parallel", ranks=4)  # six rows of a head on four ranks
    report = ld.compare(golden, mine)
    assert report.verdict in ("match", "within_noise")
    assert any("left out" in note for note in report.notes())
    wrong = ld.compare(
        golden, server.record(tmp_path, "tensor_parallel", "stale", ranks=4, name="s")
    )
    assert wrong.verdict == "diverged"
    assert "rank 1 of 4 alone" in wrong.findings[0].evidence


# -- parts and grids ------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3))
def test_shards_of_any_size_make_the_tensor_that_was_divided(
    rows: int, ranks: int, turns: int
) -> None:
    whole = torch.arange(rows * 3).reshape(rows, 3)
    pieces = whole.tensor_split(ranks * turns)
    parts = {
        (rank,): torch.cat([pieces[turn * ranks + rank] for turn in range(turns)])
        for rank in range(ranks)
    }
    if turns > 1 and rows % (ranks * turns):
        return  # turns of unequal sizes are not divided so
    recipe = Recipe((Shard(0, turns),), 1, (rows, 3))
    assert torch.equal(joined(parts, recipe), whole)


def test_parts_of_a_grid_are_put_together_from_the_last_dimension() -> None:
    whole = torch.arange(32.0).reshape(4, 8)
    parts = {
        (dp, tp): whole[[dp, dp + 2]][:, tp * 4 : tp * 4 + 4]
        for dp, tp in itertools.product(range(2), repeat=2)
    }
    recipe = Recipe((Shard(0, 2), Shard(1)), 2, (4, 7))  # with a column of padding
    assert torch.equal(joined(parts, recipe), whole[:, :7] / 2)
    halves = {(0,): whole[:, [0, 1, 6, 7]], (1,): whole[:, [2, 3, 4, 5]]}
    assert torch.equal(joined(halves, Recipe((Mirrored(1),), 1, (4, 8))), whole)


@pytest.mark.parametrize(
    ("how", "made"), [("sum", 4.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0), ("product", 3.0)]
)
def test_summands_are_reduced_in_their_dtype(how: str, made: float) -> None:
    parts = {
        (at,): torch.full((2,), value, dtype=torch.bfloat16) for at, value in enumerate((1, 3))
    }
    found = joined(parts, Recipe((how,), 1, (2,)))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [made] * 2


@pytest.mark.parametrize(
    ("groups", "places"),
    [
        ([], {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
        ([(0, 1), (2, 3), (0, 2), (1, 3)], {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}),
        ([(0, 1), (2, 3)], {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
    ],
)
def test_groups_of_one_pattern_are_a_dimension(
    groups: list[tuple[int, ...]], places: dict[int, tuple[int, ...]]
) -> None:
    assert _grid([0, 1, 2, 3], groups) == places


# -- placements -----------------------------------------------------------------------------------


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
