"""Seeds and switches: every change is reported, and all but the seeds are undone."""

from __future__ import annotations

import json
import os
import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import llmdebug_nb as ld
from llmdebug_nb import msit, msprobe

WATCHED = (
    "PYTHONHASHSEED",
    "HCCL_DETERMINISTIC",
    "LCCL_DETERMINISTIC",
    "ATB_LLM_LCOC_ENABLE",
    "CUBLAS_WORKSPACE_CONFIG",
)


def _state():
    flags = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    return (
        [os.environ.get(name) for name in WATCHED],
        flags,
        cudnn,
        functional.dropout,
        functional.dropout2d,
    )


def _draws():
    return random.random(), float(numpy.random.rand()), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def _nothing_stays_switched():
    before = _state()
    yield
    assert _state() == before


def test_a_seed_repeats_python_numpy_and_torch():
    with ld.seed_all(7):
        first = _draws()
    with ld.seed_all(7):
        assert _draws() == first
    with ld.seed_all(8):
        assert _draws() != first


def test_everything_that_is_switched_is_said_and_taken_back():
    with ld.seed_all(3, mode=True, rm_dropout=True) as changes:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["PYTHONHASHSEED"] == "3"
        assert os.environ["HCCL_DETERMINISTIC"] == "true"
        assert os.environ["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"
    for word in (
        "seeded with 3",
        "PYTHONHASHSEED=3",
        "HCCL_DETERMINISTIC",
        "use_deterministic_algorithms",
        "dropout2d",
    ):
        assert any(word in line for line in changes), word
    assert json.loads(json.dumps(changes)) == list(changes)


def test_what_was_set_before_is_set_again(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with ld.seed_all(3, mode=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["PYTHONHASHSEED"] == "11"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        monkeypatch.undo()


def test_on_cuda_its_libraries_are_switched_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    was = torch.backends.cudnn.benchmark  # a package that another test imports may switch it on
    torch.backends.cudnn.benchmark = True
    try:
        with ld.seed_all(3) as changes:
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (
                True,
                False,
            )
        assert torch.backends.cudnn.benchmark
        assert "torch.backends.cudnn.benchmark off" in changes
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # repeats as well
        with ld.seed_all(3):
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.backends.cudnn.benchmark = was
        monkeypatch.undo()


def test_without_mode_the_programs_own_choice_stays():
    torch.use_deterministic_algorithms(True)
    try:
        with ld.seed_all(3):
            assert torch.are_deterministic_algorithms_enabled()
            assert "HCCL_DETERMINISTIC" not in os.environ
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operator_that_can_not_repeat_raises_in_mode():
    with ld.seed_all(3, mode=True), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))


def test_switches_may_be_nested_and_restored_twice():
    outer = ld.seed_all(1, mode=True)
    inner = ld.seed_all(2, mode=True)
    inner.restore()
    inner.restore()
    assert os.environ["PYTHONHASHSEED"] == "1"
    assert torch.are_deterministic_algorithms_enabled()
    outer.restore()


@pytest.mark.parametrize(
    "kind",
    [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout],
)
def test_without_dropout_nothing_is_dropped_in_training(kind):
    x = (
        torch.rand(4, 3, 5, 5)
        if kind is nn.Dropout2d
        else torch.rand(4, 3, 5, 5, 5)
        if kind is nn.Dropout3d
        else torch.rand(4, 3, 50)
    )
    layer = kind(0.5).train()
    with ld.seed_all(3, rm_dropout=True):
        assert torch.equal(layer(x), x)
    assert not torch.equal(layer(x), x)


def test_an_impossible_dropout_is_still_an_error():
    with ld.seed_all(3, rm_dropout=True), pytest.raises(ValueError, match="between 0 and 1"):
        functional.dropout(torch.ones(3), p=2.0)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7", None, True])
def test_a_seed_that_not_all_can_take_is_refused(seed):
    with pytest.raises(ld.errors.OptionError, match="seed"):
        ld.seed_all(seed)


@pytest.mark.parametrize("flags", [{"mode": 1}, {"rm_dropout": "yes"}])
def test_a_flag_is_true_or_false(flags):
    with pytest.raises(ld.errors.OptionError, match=next(iter(flags))):
        ld.seed_all(3, **flags)


def test_any_whole_number_is_a_seed():
    with ld.seed_all(numpy.int64(5)) as changes:
        assert any("seeded with 5" in line for line in changes)


def test_the_debugger_offers_the_same():
    assert msprobe.PrecisionDebugger.seed_all is ld.seed_all


# -- in a recording -------------------------------------------------------------------------------


def _model():
    return nn.Sequential(nn.Linear(3, 3))


def test_a_recordings_seed_is_noted_and_switches_nothing():
    model = _model()
    with ld.dump(model, name="r", seed=3) as run:
        assert not torch.are_deterministic_algorithms_enabled()
        drawn = _draws()
        model(torch.ones(1, 3))
    assert run.meta["determinism"] == ["random, numpy and torch seeded with 3"]
    with ld.dump(model, name="r", seed=3):
        assert _draws() == drawn
        model(torch.ones(1, 3))


def test_without_a_seed_nothing_is_noted():
    model = _model()
    with ld.dump(model, name="r") as run:
        model(torch.ones(1, 3))
    assert "determinism" not in run.meta


def test_a_seed_in_dump_config_switches_determinism_on_until_the_recording_stops(tmp_path):
    model = _model()
    hook = msit.register_hook(model, msit.DumpConfig(dump_path=tmp_path, seed=4))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["PYTHONHASHSEED"] == "4"
    model(torch.ones(1, 3))
    run = hook.stop()
    assert "torch.use_deterministic_algorithms on" in run.meta["determinism"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_empty_or_refused_recording_takes_its_switches_back(tmp_path):
    model = _model()
    with pytest.raises(ld.errors.EmptyDumpError):
        msit.register_hook(model, msit.DumpConfig(dump_path=tmp_path, seed=4)).stop()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ld.errors.EmptyDumpError):
        msit.register_hook(model, msit.DumpConfig(dump_path=tmp_path, seed=4, layer_name="nowhere"))
