"""Compile a model to Triton kernels, plain and recorded; print the outcome as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

import llmdebug_nb as ld
from test_compiled import example, model
from triton_interpreter import interpreted


def step(net: torch.nn.Module, forward: Any) -> list[torch.Tensor]:
    """Return the output and all gradients."""
    out = forward(example())
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in net.parameters())]


def buffers(report: Any) -> list[Any]:
    return [
        d
        for d in report.differences
        if d.site.role == "output" and "/" in d.site.path and d.pair.mine
    ]


def faithful() -> dict[str, Any]:
    """One training step: plain, and recorded."""
    plain, recorded = model(), model()
    with interpreted():
        expected = step(plain, torch.compile(plain))
        torch._dynamo.reset()
        with ld.dump(recorded, name="k", graph="both") as run:
            got = step(recorded, recorded)
    report = ld.compare("k.fx", run)
    written = buffers(report)
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)),
        "verdict": report.verdict,
        "written": len(written),
        "mapped": sum(d.pair.golden is not None for d in written),
        "phases": sorted({d.site.phase for d in written}),
        "kernels": dict(run.index.query(tuple, "SELECT name, source FROM all_kernels")),
        "problems": run.meta.get("problems") or [],
    }


def spoilt() -> dict[str, Any]:
    """1 % too much, in the second kernel with a root."""
    seen: list[str] = []

    def changed(source: str) -> str:
        seen.extend(["root"] * ("libdevice.rsqrt(" in source))
        wrong = "libdevice.rsqrt(" in source and len(seen) == 2
        return source.replace("libdevice.rsqrt(", "1.01 * libdevice.rsqrt(") if wrong else source

    net = model()
    torch._dynamo.reset()
    with interpreted(changed), torch.no_grad(), ld.dump(net, name="wrong", graph="both"):
        net(example())
    report = ld.compare("wrong.fx", "wrong")
    findings = [[f.path, f.cause, f.kernel.name, list(f.kernel.nodes)] for f in report.findings]
    return {"roots": len(seen), "verdict": report.verdict, "findings": findings}


if __name__ == "__main__":
    print(json.dumps({"faithful": faithful(), "spoilt": spoilt()}))
