"""A generation dumped by ATB: its rounds are tokens, and it compares with the torch program."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import llmdebug_nb as ld
from atb_llama import AtbLlama
from models import llama

PROMPT, NEW = torch.tensor([5, 7, 9, 11, 2, 3]), 4
BLAMED = {
    "keys_not_turned": "model.layers.1.self_attn",
    "scale": "model.layers.1.self_attn",
    "gate_and_up_swapped": "model.layers.1.mlp",
}


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return llama().eval()


@pytest.fixture
def golden(model, tmp_path: Path) -> ld.Run:
    with ld.dump(model, name="golden", path=tmp_path) as run, torch.no_grad():
        model.generate(PROMPT[None], max_new_tokens=NEW, do_sample=False)
    return run


@torch.no_grad()
def dumped(model, folder: Path, bug: str = "", warmup: bool = False) -> Path:
    base = folder / "atb_dump_data/data/0_7"
    AtbLlama(model, base, bug).generate(PROMPT, NEW, warmup)
    return folder / "atb_dump_data"


def kinds(run: ld.Run) -> list[tuple[int, int, str]]:
    return [(call.generation, call.step, call.kind) for call in run.root_calls()]


@pytest.mark.parametrize("warmup", [False, True])
def test_rounds_are_tokens_and_the_warm_up_is_none(model, tmp_path, warmup):
    run = ld.open_run(dumped(model, tmp_path, warmup=warmup))
    tokens = [(0, 0, "prefill"), (0, 1, "decode"), (0, 2, "decode"), (0, 3, "decode")]
    assert kinds(run) == [(-1, 0, "warmup")] * warmup + tokens
    ids = [run.tensor("0_WordEmbedding", step, "input", 1).numel() for step in range(4)]
    assert ids == [len(PROMPT), 1, 1, 1]
    assert run.find("6_LmHead", 0).summary.shape == (1, 96)
    assert run.find("5_LmHead", 1).summary.shape == (1, 96)


def test_in_a_dump_of_one_round_the_sizes_tell_the_two_graphs(model, tmp_path):
    dump = dumped(model, tmp_path)
    for number in (1, 2):
        shutil.rmtree(dump / f"data/0_7/{number}")
    run = ld.open_run(dump)
    assert kinds(run) == [(0, 0, "prefill"), (0, 1, "decode")]
    assert len({record.site.path for record in run.records(step=0)}) > len(
        {record.site.path for record in run.records(step=1)}
    )
    assert run.find("6_LmHead", 0).summary.shape == (1, 96)


def test_rounds_stay_rounds_where_one_graph_was_dumped(model, tmp_path):
    dump = dumped(model, tmp_path)
    shutil.rmtree(dump / "data/0_7/0")
    assert kinds(ld.open_run(dump)) == [(0, 1, "forward"), (0, 2, "forward")]


@pytest.mark.parametrize("warmup", [False, True])
def test_a_right_program_of_atb_is_within_noise_of_the_torch_program(
    golden, model, tmp_path, warmup
):
    report = ld.compare(golden, dumped(model, tmp_path, warmup=warmup))
    assert report.verdict == "within_noise"
    assert report.coverage.observables == report.coverage.observables_matched == NEW
    assert not report.findings


@pytest.mark.parametrize("bug", BLAMED)
def test_a_bug_of_a_program_of_atb_is_found_in_the_module_that_it_is_in(
    golden, model, tmp_path, bug
):
    report = ld.compare(golden, dumped(model, tmp_path, bug))
    assert report.verdict == "diverged"
    assert report.findings[0].path == BLAMED[bug]
