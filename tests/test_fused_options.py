"""Each option of a recording works with Inductor's fused code, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import Record

Check = Callable[[Sequence[Record]], bool]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.a(x)).exp() * self.n(x).cos()


def recorded(folder: Path, **options: object) -> list[Record]:
    """Return the records of two steps, forward and backward."""
    torch._dynamo.reset()
    net = Net()
    with ld.inductor_backend(**{"name": "k", "path": folder, **options}) as backend:
        compiled = torch.compile(net, backend=backend)
        for _ in range(2):
            compiled(torch.ones(4, 8)).sum().backward()
    return list(backend.run.records())


def steps(*wanted: int) -> Check:
    return lambda records: {r.site.step for r in records} == set(wanted)


def kernels(records: Sequence[Record]) -> set[str]:
    return {r.site.path for r in records if "/" in r.site.path}


# what each option does to the records
WORKS: dict[str, tuple[object, Check]] = {
    "name": ("other", bool),
    "tokens": ("1", steps(1)),
    "every": (2, steps(0)),
    "last": (1, steps(1)),
    "rounds": ("1,1", steps(1)),
    "ranks": ("0", steps(0, 1)),
    "warmup": (1, lambda records: -1 in {r.site.generation for r in records}),
    "control": (None, bool),
    "phase": ("backward", lambda records: {r.site.phase for r in records} == {"backward"}),
    "part": ("out", lambda records: "input" not in {r.site.role for r in records}),
    "layers": ("a", lambda records: {p.split("/")[0] for p in kernels(records)} == {"a"}),
    "types": ("LayerNorm", lambda records: {p.split("/")[0] for p in kernels(records)} == {"n"}),
    "opname": ("mul", lambda records: all("mul" in path for path in kernels(records))),
    "device": ("cpu", bool),
    "apis": ("addmm", lambda records: all("addmm" in path for path in kernels(records))),
    "contains": ("addmm", lambda records: all("addmm" in path for path in kernels(records))),
    "scope": ("Aten.addmm.0.forward,Aten.addmm.0.forward", bool),
    "weights": (True, lambda records: "weight" in {r.site.role for r in records}),
    "stats_only": (True, lambda records: not any(r.payload is not None for r in records)),
    "slice": ("0", lambda records: {r.kept for r in records} == {"slice[0]"}),
    "reduce": ("minmax", lambda records: {r.kept for r in records} == {"minmax"}),
    "max_bytes": (64, lambda records: not all(r.payload is not None for r in records)),
    "fingerprint": ("crc32", lambda records: all("crc32" in str(r.summary) for r in records)),
    "sources": (False, bool),
    "seed": (3, bool),
    "graph": ("both", bool),
    "fusion_switch": ({"Switch": {"ALL": "off"}}, lambda records: len(kernels(records)) > 12),
    "compiler_config": ({"max_fusion_size": 1}, bool),
    "profile": ("kernel", bool),
}
# the value, and why it is refused
REFUSED: dict[str, tuple[object, str]] = {
    "mode": ("aten", "graph='fused' says what is recorded; leave mode out"),
    "time": (1, "time and graph exclude each other"),
    "ids": ("1", "graph and ids exclude each other"),
    "requests": ("0", "requests"),
    "children": (False, "graph and children=False exclude each other"),
    "logits": (True, "graph and logits exclude each other"),
    "force_eager": (True, "graph and force_eager exclude each other"),
    "alarm": ("nan", "alarm is for last"),
    "overflow": (0, "no call overflowed"),  # it works: nothing is left of a finite program
}


def test_the_tables_hold_every_option():
    assert WORKS.keys() | REFUSED.keys() == set(DumpOptions.names()) - {"path"}
    assert not WORKS.keys() & REFUSED.keys()


@pytest.mark.parametrize("option", WORKS)
def test_an_option_that_is_taken_does_what_it_says(inductor: None, tmp_path: Path, option: str):
    value, check = WORKS[option]
    records = recorded(tmp_path, **{option: value})
    assert kernels(records)
    assert check(records)


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_without_a_meaning_is_refused_with_the_reason(
    inductor: None, tmp_path: Path, option: str
):
    value, says = REFUSED[option]
    with pytest.raises(ld.errors.LLMDebugError, match=says):
        recorded(tmp_path, **{option: value})


def test_operators_that_are_named_with_a_bang_alone_are_left_out(inductor: None, tmp_path: Path):
    paths = kernels(recorded(tmp_path, apis="!addmm"))
    assert paths
    assert not any("addmm" in path for path in paths)
