"""Tensors of foreign dumps are read when their figures are asked for, once, and no earlier."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import llmdebug_nb as ld
from layout_files import save, write
from llmdebug_nb.store.layouts import drafts

N = 9


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A folder of N arrays; each holds its number."""
    for number in range(N):
        np.save(tmp_path / f"t{number}.npy", np.full((2, 3), number, np.float32))
    return tmp_path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The first element of each tensor that was described, in the order of reading."""
    seen: list[float] = []
    described_as = drafts.described_as

    def noted(tensor: torch.Tensor):
        seen.append(float(tensor.flatten()[0]))
        return described_as(tensor)

    monkeypatch.setattr(drafts, "described_as", noted)
    return seen


def test_opening_a_foreign_dump_reads_no_more_than_one_tensor(dump, read):
    run = ld.open_run(dump)
    assert len(run) == N
    assert (run.info()["records"], run.info()["payloads"], run.info()["lost"]) == (N, N, 0)
    assert [step.step for step in run.steps()] == [0]
    assert run.nodes == []
    repr(run)
    assert read == [0.0]


def test_one_tensor_is_read_where_one_is_asked_for(dump, read):
    run = ld.open_run(dump)
    assert run.tensor("t7")[0, 0] == 7
    assert run.find("t7").summary.mean == 7
    assert read == [0.0, 7.0]


def test_a_table_reads_every_tensor_once(dump, read):
    run = ld.open_run(dump)
    assert run.to_pandas()["mean"].tolist() == list(range(N))
    assert sorted(read) == list(range(N))
    assert {record.summary.max for record in run.records()} == set(range(N))
    assert len(read) == N


def test_an_interrupt_keeps_what_was_read_and_the_next_question_goes_on(dump, read, monkeypatch):
    run = ld.open_run(dump)
    noted = drafts.described_as

    def interrupted(tensor: torch.Tensor):
        if len(read) == 5:
            raise KeyboardInterrupt
        return noted(tensor)

    monkeypatch.setattr(drafts, "described_as", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.to_pandas()
    monkeypatch.setattr(drafts, "described_as", noted)
    assert run.to_pandas()["mean"].tolist() == list(range(N))
    assert sorted(read) == list(range(N))


def test_a_damaged_file_is_counted_with_its_reason_once_it_was_asked_for(dump):
    (dump / "t4.npy").write_bytes((dump / "t4.npy").read_bytes()[:-1])
    run = ld.open_run(dump)
    assert run.info()["lost"] == 0
    table = run.to_pandas()
    assert table[table.path == "t4"]["payload"].tolist() == [False]
    assert (run.info()["payloads"], run.info()["lost"]) == (N - 1, 1)
    ((reason, count),) = run.index.lost_reasons(3)
    assert "t4.npy" in reason
    assert count == 1
    with pytest.raises(ld.errors.TensorLookupError, match=r"t4\.npy"):
        run.tensor("t4")


def test_the_shapes_of_weights_are_read_with_the_model_tree(tmp_path, read):
    step = tmp_path / "cpu_1"
    tree = {"name": "root", "type": "Net", "children": [{"name": "root.fc", "type": "Linear"}]}
    write(step / "model_tree.json", json.dumps(tree))
    save(torch.ones(2, 3), step / "0/root.fc/output.pth")
    save(torch.full((4, 3), 5.0), step / "weights/root.fc.weight.pth")
    run = ld.open_run(step)
    (fc,) = [node for node in run.nodes if node.path == "fc"]
    assert fc.params == {"weight": [4, 3]}
    assert 5.0 in read
