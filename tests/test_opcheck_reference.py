"""`opcheck -dtype` and `-threads`: a reference that is not computed in float64."""

from __future__ import annotations

import math

import pytest
import torch

import llmdebug_nb as ld
from llmdebug_nb.cli import main
from llmdebug_nb.comparison.operator_error import Bound
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.replay import checks, execution
from models import ARCHITECTURES
from recordings import record
from test_opcheck import DTYPES, FAULTS, _adds_up, _mlp, _plant
from test_opcheck_atb import W, X, _dump


@pytest.mark.parametrize("reference", ["float32", "own"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_correct_program_raises_no_alarm_forward_and_backward(architecture, dtype, reference):
    model = ARCHITECTURES[architecture]().to(dtype)
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 6, 7, 8, 9]])
    for mode in ("api", "aten"):
        run = record(model, lambda: model(ids, labels=ids).loss.backward(), mode=mode)
        result = ld.opcheck(run, dtype=reference).result
        assert [str(each) for each in result.wrong] == []
        assert _adds_up(result)
        assert result.checked > 0.95 * result.total


@pytest.mark.parametrize("fault", ["1 % wrong", "one row", "NaN", "one element"])
@pytest.mark.parametrize("reference", ["float32", "own"])
def test_a_fault_is_found_against_a_reference_with_rounding(reference, fault, monkeypatch):
    run = _mlp(torch.bfloat16)
    _plant(monkeypatch, "Functional.silu", FAULTS[fault])
    assert {c.op for c in ld.opcheck(run, dtype=reference).wrong} == {"Functional.silu"}


def test_the_reference_has_the_dtype_and_the_threads_that_were_asked_for(monkeypatch):
    run, seen = _mlp(torch.bfloat16), set()
    compute = execution.run

    def noted(task):
        tensors = [x for x in task.args if isinstance(x, torch.Tensor)]
        seen.add((tensors[0].dtype, torch.get_num_threads()))
        return compute(task)

    monkeypatch.setattr(execution, "run", noted)
    before = torch.get_num_threads()
    cases = {"own": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    for name, dtype in cases.items():
        seen.clear()
        ld.opcheck(run, dtype=name, threads=before + 1)
        assert seen == {(dtype, before + 1)}, name
    seen.clear()
    ld.opcheck(run, threads=2)
    assert seen == {(torch.bfloat16, 2)}
    assert torch.get_num_threads() == before


def test_two_roundings_explain_the_root_of_the_sum_of_their_squares():
    one, other = Bound.of(torch.float32, 100), Bound.of(torch.bfloat16, 100)
    both = one.with_other(other)
    assert both.error == pytest.approx(math.sqrt(one.error**2 + other.error**2))
    assert both.factor == pytest.approx(math.sqrt(one.factor**2 + other.factor**2))


def test_a_formula_in_float64_alone_is_not_checked_otherwise(tmp_path):
    made = X.astype("float64") @ W.T.astype("float64")
    dump = _dump(tmp_path, "Linear", {"transposeB": True, "hasBias": False}, [X, W], [made])
    assert ld.opcheck(dump).result.checked == 1
    assert ld.opcheck(dump, dtype="own").result.not_checked == {checks.DTYPE: 1}


def test_the_command_line_says_which_reference_it_was_and_refuses_others(capsys, tmp_path):
    run = _mlp()
    command = ["opcheck", "-i", str(run.path), "-o", str(tmp_path)]
    assert main([*command, "-threads", "1"]) == 0
    assert "reference: in the dtype of the call, 1 thread" in capsys.readouterr().out
    assert main([*command, "-dtype", "float32", "-j", "2"]) == 0
    assert "reference: in float32\n" in capsys.readouterr().out
    assert main([*command, "-threads", "0"]) == 3
    assert "threads: 0 threads; expected 1 to" in capsys.readouterr().err
    with pytest.raises(OptionError, match="dtype: 'int8' is not known; expected float64"):
        ld.opcheck(run, dtype="int8")
