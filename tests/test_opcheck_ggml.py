"""Nodes of llama.cpp's graphs are recomputed: right ones pass as in float32, faults are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmdebug_nb as ld
from fake_ggml import F16, F32, Q8_0, Fake, installed
from llmdebug_nb.replay import checks

Make = Callable[..., Fake]


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Make:
    installed(monkeypatch)
    return Fake


def recorded(engine: Fake, **options: object) -> ld.Run:
    with ld.dump(engine, name="gguf", **{"tokens": "all", "weights": True, **options}) as run:
        engine.eval([3, 1, 4, 1, 5])
        engine.eval([9])
    assert run.meta["problems"] == {}
    return run


def wrong(run: ld.Run, **options: object) -> set[str]:
    return {each.key.path for each in ld.opcheck(run, progress=False, **options).wrong}


@pytest.mark.parametrize("kind", [F32, F16, Q8_0])
@pytest.mark.parametrize("neox", [False, True])
def test_each_node_of_a_right_run_is_right_at_the_sharpness_of_float32(
    llama: Make, kind: int, neox: bool
) -> None:
    result = ld.opcheck(recorded(llama(kind, neox)), progress=False).result
    assert [str(each) for each in result.wrong] == []
    assert result.not_checked == {}
    assert result.checked == result.total > 30
    worst = max(out.l2 or 0.0 for each in result.calls for out in each.outputs)
    assert worst < 1e-6


# a node of the fake, and where it is in the dump
NODES = {
    "embd/GET_ROWS": "token_embd/Ggml.GET_ROWS",
    "norm-0/RMS_NORM": "blk.0.attn_norm/Ggml.RMS_NORM",
    "attn_norm-0/MUL": "blk.0.attn_norm/Ggml.MUL",
    "Qcur-0/MUL_MAT": "blk.0.attn_q/Ggml.MUL_MAT",
    "Kcur-0/ROPE": "blk.0/Ggml.ROPE",
    "kq-0/MUL_MAT": "blk.0/Ggml.MUL_MAT",
    "kq_soft_max-0/SOFT_MAX": "blk.0/Ggml.SOFT_MAX",
    "kqv-0/MUL_MAT": "blk.0/Ggml.MUL_MAT",
    "kqv_out-0/CONT": "blk.0/Ggml.CONT",
    "ffn_inp-0/ADD": "blk.0/Ggml.ADD",
    "ffn_swiglu-0/SWIGLU": "blk.0/Ggml.SWIGLU",
    "result_output/MUL_MAT": "output/Ggml.MUL_MAT",
}


@pytest.mark.parametrize("node", NODES)
def test_a_thousandth_too_much_is_found_in_any_node_of_a_quantised_file(
    llama: Make, node: str
) -> None:
    engine = llama(Q8_0)
    engine.spoil[node] = lambda x: (x * np.float32(1.001)).astype(np.float32)
    assert wrong(recorded(engine)) == {NODES[node]}


@pytest.mark.parametrize(
    ("setting", "value", "op"),
    [("eps", 1e-2, "RMS_NORM"), ("base", 5e5, "ROPE"), ("scale", 1.0, "SOFT_MAX")],
)
def test_a_computation_by_other_parameters_than_the_graph_tells_is_named(
    llama: Make, setting: str, value: float, op: str
) -> None:
    engine = llama(Q8_0)
    engine.settings[setting] = value
    run = recorded(engine)
    found = ld.opcheck(run, progress=False).wrong
    assert {each.op for each in found} == {f"Ggml.{op}"}
    said = {"eps": "eps=1e-05", "base": "freq_base=10000.0", "scale": "scale=0.17677669"}
    assert all(said[setting] in each.parameters for each in found)


def test_a_weight_that_changed_after_it_was_recorded_is_named(llama: Make) -> None:
    engine = llama(F16)
    weight = engine._weights["blk.0.ffn_up.weight"]
    with ld.dump(engine, name="gguf", tokens="all", weights=True) as run:
        engine.eval([3, 1, 4])
        weight.values[..., 0] *= 2
        engine.eval([1])
    found = ld.opcheck(run, progress=False).wrong
    assert [(each.key.path, each.key.step) for each in found] == [("blk.0.ffn_up/Ggml.MUL_MAT", 1)]


def test_an_input_that_is_not_rounded_as_ggml_does_is_found(llama: Make) -> None:
    engine = llama(Q8_0)
    engine.spoil["ffn_gate-0/MUL_MAT"] = lambda _: (
        engine.last_product @ engine.dequantised("blk.0.ffn_gate.weight")[0, 0].T
    )
    run = recorded(engine)
    (first, *_) = ld.opcheck(run, progress=False).wrong
    assert first.key.path == "blk.0.ffn_gate/Ggml.MUL_MAT"
    assert first.outputs[0].l2 is not None
    assert 1e-3 < first.outputs[0].l2 < 1e-1  # what rounding to 8 bits leaves


# -- what can't be checked -------------------------------------------------------------------------


def test_without_weights_what_needs_them_or_the_cache_is_counted(llama: Make) -> None:
    result = ld.opcheck(recorded(llama(F32), weights=False), progress=False).result
    assert result.checked + sum(result.not_checked.values()) == result.total
    assert {each.reason for each in result.calls if each.reason} == {checks.GAP}
    details = {each.detail.partition(" (")[0] for each in result.calls if each.reason}
    assert {each.partition(" was not")[0] for each in details} == {
        "its weight", "what it reads of the cache"
    }  # fmt: skip
    checked = {each.op.removeprefix("Ggml.") for each in result.calls if not each.reason}
    assert checked == {"RMS_NORM", "ROPE", "SOFT_MAX", "ADD", "SWIGLU", "CONT"}


def test_products_on_another_device_are_not_checked(llama: Make) -> None:
    engine = llama(F32)
    kept = engine.library
    kept.device = lambda tensor: "" if kept.is_weight(tensor) else "CUDA0"  # type: ignore[method-assign]
    result = ld.opcheck(recorded(engine), progress=False).result
    reasons = {each.op: each.reason for each in result.calls}
    assert reasons["Ggml.MUL_MAT"] == checks.UNKNOWN
    assert reasons["Ggml.RMS_NORM"] == ""


def test_statistics_alone_say_so(llama: Make) -> None:
    result = ld.opcheck(recorded(llama(F32), stats_only=True), progress=False).result
    assert result.checked == 0
    assert set(result.not_checked) <= {checks.STATISTICS, checks.GAP}


def test_a_file_of_weights_needs_a_run_of_llamacpp(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    with ld.dump(model, name="torch") as run:
        model(torch.ones(1, 2))
    with pytest.raises(ld.errors.OptionError, match=r"no nodes of llama\.cpp"):
        ld.opcheck(run, weights=tmp_path / "model.gguf", progress=False)
