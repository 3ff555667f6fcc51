"""opcheck knows operators of torch's inner namespaces, complex ones, and losses with targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from llmdebug_nb.replay.checks import RANDOM, CallCheck, OpCheckResult
from llmdebug_nb.store.run import Run

Function = Callable[[torch.Tensor], torch.Tensor]


class Program(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _checked(function: Function, x: torch.Tensor, folder: Path) -> OpCheckResult:
    """Record a function, forward and backward, and check its operators."""
    model = Program(function)
    x = x.detach().requires_grad_(x.is_floating_point() or x.is_complex())
    with ld.dump(model, mode="api", path=folder) as run:
        result = model(x)
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    return ld.opcheck(run, progress=False, output=folder).result


def _calls(result: OpCheckResult, op: str) -> list[CallCheck]:
    return [call for call in result.calls if call.op == op]


def _square() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 4) + 3 * torch.eye(4)


OPERATORS: dict[str, tuple[str, Function]] = {
    "norm": ("Torch.linalg.norm", torch.linalg.norm),
    "vector norm": ("Torch.linalg.vector_norm", lambda x: torch.linalg.vector_norm(x, 3, -1)),
    "matrix norm": ("Torch.linalg.matrix_norm", torch.linalg.matrix_norm),
    "diagonal": ("Torch.linalg.diagonal", torch.linalg.diagonal),
    "inverse": ("Torch.linalg.inv", torch.linalg.inv),
    "special": ("Torch.special.erfcx", torch.special.erfcx),
    "Fourier": ("Torch.fft.fft", lambda x: torch.fft.fft(x).real),
    "fill": ("Torch.fill", lambda x: torch.fill(x, 2.0) + x),
    "pool": (
        "Functional.adaptive_max_pool1d_with_indices",
        lambda x: F.adaptive_max_pool1d(x[None], 2, return_indices=True)[0],
    ),
    "loss": ("Functional.soft_margin_loss", lambda x: F.soft_margin_loss(x, x.detach().sign())),
    "complex": ("Tensor.mul", lambda x: (torch.polar(x.abs(), x) * torch.polar(x, x)).real),
}


@pytest.mark.parametrize(("op", "function"), OPERATORS.values(), ids=list(OPERATORS))
def test_an_operator_is_checked_forward_and_backward(op, function, tmp_path):
    result = _checked(function, _square(), tmp_path)
    assert [call.detail for call in result.calls if call.reason] == []
    assert [call.verdict for call in result.calls] == ["right"] * len(result.calls)
    assert {call.key.phase for call in _calls(result, op)} == {"forward", "backward"}


@pytest.mark.parametrize("fault", [1.1, 1.001])
@pytest.mark.parametrize("kind", ["norm", "diagonal", "Fourier", "pool", "complex"])
def test_a_fault_in_such_an_operator_is_found(kind, fault, tmp_path, monkeypatch):
    op, function = OPERATORS[kind]
    load = Run.load

    def faulty(self, record):
        x = load(self, record)
        return x * fault if record.site.role == "output" and x.is_floating_point() else x

    # a complex result has its fault in the operator after it, whose input is right
    monkeypatch.setattr(Run, "load", faulty)
    result = _checked(function, _square(), tmp_path)
    wrong = [call for call in result.calls if call.verdict == "wrong"]
    assert any(call.key.phase == "backward" for call in wrong)
    if kind not in ("Fourier", "complex"):
        assert "wrong" in {call.verdict for call in _calls(result, op)}


def test_a_complex_result_is_judged_by_double_precision(tmp_path, monkeypatch):
    """A relative error of 1e-4, a thousand times what complex64 rounds by."""
    load = Run.load

    def faulty(self, record):
        x = load(self, record)
        return x * (1 + 1e-4) if record.site.role == "output" and x.is_complex() else x

    monkeypatch.setattr(Run, "load", faulty)
    x = torch.view_as_complex(_square().reshape(4, 2, 2))
    calls = _calls(_checked(lambda x: x * x, x, tmp_path), "Tensor.mul")
    assert [call.verdict for call in calls if call.key.phase == "forward"] == ["wrong"]


@pytest.mark.parametrize(
    ("fault", "verdict"), [(1.0, "right"), (1 + 1e-4, "right"), (1.1, "wrong")]
)
def test_what_an_operator_keeps_beside_its_result_is_as_exact_as_that(
    fault, verdict, tmp_path, monkeypatch
):
    """Attention in bfloat16 keeps float32 numbers, which some CPUs make by a fast exponential."""
    load = Run.load

    def faulty(self, record):
        x = load(self, record)
        return x * fault if (record.site.role, record.site.slot) == ("output", "1") else x

    monkeypatch.setattr(Run, "load", faulty)
    model = Program(lambda x: F.scaled_dot_product_attention(x, x, x))
    x = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with ld.dump(model, mode="aten", path=tmp_path) as run:
        model(x)
    calls = ld.opcheck(run, progress=False, output=tmp_path).result.calls
    (call,) = (c for c in calls if [o.dtype for o in c.outputs] == ["bfloat16", "float32"])
    assert call.verdict == verdict


def test_what_draws_random_numbers_is_not_checked_and_says_so(tmp_path):
    result = _checked(lambda x: torch.normal(x, 1.0), _square(), tmp_path)
    assert [call.reason for call in _calls(result, "Torch.normal")] == [RANDOM] * 2


def test_an_overflow_inside_a_kernel_of_torch_is_wrong(tmp_path):
    """log(1 + exp(30)) is 30, but the kernel computes exp(30) in float16 on the way."""
    x = torch.tensor([30.0, 1.0], dtype=torch.float16)
    target = torch.tensor([-1.0, 1.0], dtype=torch.float16)
    result = _checked(lambda x: F.soft_margin_loss(x, target, reduction="none"), x, tmp_path)
    forward = _calls(result, "Functional.soft_margin_loss")[0]
    here = F.soft_margin_loss(x, target, reduction="none")
    assert forward.verdict == ("right" if here.isfinite().all() else "wrong")


def test_a_gradient_that_is_only_marked_as_conjugate_is_judged(tmp_path):
    x = torch.view_as_complex(_square().reshape(4, 2, 2))
    result = _checked(lambda x: torch.vdot(x[0], x[1]), x, tmp_path)
    assert [call.verdict for call in _calls(result, "Torch.vdot")] == ["right", "right"]


def test_the_call_of_a_backward_pass_is_no_operator(tmp_path):
    model = Program(torch.tanh)
    with ld.dump(model, mode="api", path=tmp_path) as run:
        y = model(_square().requires_grad_())
        torch.autograd.backward(y, torch.ones_like(y))
    calls = ld.opcheck(run, progress=False, output=tmp_path).result.calls
    assert "Torch.autograd.backward" not in {call.op for call in calls}
    assert {call.key.phase for call in calls if call.op == "Torch.tanh"} == {"forward", "backward"}


@pytest.mark.parametrize("chosen", [{"names": "absent"}, {"ids": "99_9"}, {"paths": "no.*"}])
def test_a_choice_of_no_call_says_what_there_is(chosen, tmp_path):
    with ld.dump(model := Program(torch.tanh), mode="api", path=tmp_path) as run:
        model(_square())
    with pytest.raises(ld.LLMDebugError, match=r"none of the 1 calls .* has .*Torch\.tanh"):
        ld.opcheck(run, progress=False, output=tmp_path, **chosen)
