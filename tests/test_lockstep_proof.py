"""Proofs and calibrations in lockstep: what they say on two dumps, in bounded memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.core.errors import OptionError, ProofError
from lockstep_pairs import BUGS, DOWN, INPUTS, NORM, dumped, hooks, nothing_is_left, told, two  # noqa: F401
from recordings import record, scaled


@pytest.mark.parametrize("window", ["1GiB", "20kB"])
def test_a_proof_says_what_it_says_of_dumps(window: str) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    expected = dumped(golden, mine, lambda model: model(**INPUTS)).findings[0].prove()
    before, state = hooks(golden, mine), torch.get_rng_state()
    options = {"window": window, "progress": False, "prove": True}
    report = ld.lockstep(golden, mine, INPUTS, **options)
    proof = report.findings[0].proof
    assert replace(proof, next=None) == replace(expected, next=None)
    assert [proof.agrees, proof.next.path, expected.next.path] == [False, NORM, NORM]
    assert report.lockstep.unsteady == 0
    assert hooks(golden, mine) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_is_looked_into_and_a_finding_proven_after_the_comparison() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    report = ld.lockstep(golden, mine, INPUTS, window="20kB", progress=False)
    inside = report.look_inside()
    assert inside.findings[0].path == f"{DOWN}/Tensor.mul"
    assert report.findings[0].prove().agrees


def test_a_calibration_says_what_it_says_of_dumps() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> object:
        return model(**INPUTS)

    runs = [
        record(model, lambda model=model: work(model), name)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    near = copy.deepcopy(golden)
    scaled("model.norm", 1.01)(near)
    other = record(near, lambda: work(near), "other")
    for calibrate in ("auto", [other]):
        expected = ld.compare(*runs, calibrate=calibrate, progress=False)
        options = {"window": "20kB", "progress": False, "calibrate": calibrate}
        report = ld.lockstep(golden, mine, work, **options)
        assert told(report) == told(expected)
        assert report.lockstep.ran > (1, 1)
    assert not any(hooks(golden))


@pytest.mark.parametrize("wanted", [{"stop": "first"}, {"graft": True}])
def test_a_stop_and_a_graft_are_neither_calibrated_nor_proven(wanted: dict[str, Any]) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    for more, message in (({"prove": True}, "prove: not with"), ({"calibrate": "auto"}, "noise")):
        with pytest.raises(OptionError, match=message):
            ld.lockstep(golden, mine, INPUTS, **wanted, **more)
    report = ld.lockstep(golden, mine, INPUTS, progress=False, **wanted)
    with pytest.raises(ProofError, match="prove: not with stop or graft"):
        report.findings[0].prove()
