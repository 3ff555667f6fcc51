"""Two models for tests of lockstep, and what must not depend on how they are compared."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import llmdebug_nb as ld
import models
from recordings import record, scaled

IDS = torch.arange(1, 9)[None]
INPUTS = {"input_ids": IDS}
SECRET = "a secret of tests"
ALL: dict[str, Any] = {"mode": ("module", "api"), "weights": True}
MODULES: dict[str, Any] = {"mode": "module", "weights": True}


def two(*changes: Callable[[Any], object], **config: Any) -> tuple[Any, Any]:
    """Return a Llama, and its copy with changes."""
    golden = models.llama(**config)
    mine = copy.deepcopy(golden)
    for change in changes:
        change(mine)
    return golden, mine


DOWN, NORM = "model.layers.1.mlp.down_proj", "model.layers.2.input_layernorm"
BUGS = scaled(DOWN, 1.1), scaled(NORM, 0.9)


def told(report: Any) -> dict[str, object]:
    """Return what must not depend on how two programs were compared."""
    first = report.first_divergence
    return {
        "verdict": report.verdict,
        "rows": Counter(d.verdict for d in report.differences),
        "errors": [(str(d.site), d.error, d.limit) for d in report.differences],
        "coverage": str(report.coverage),
        "first": str(first and first.site),
        "findings": [(f.path, f.cause, f.step, f.evidence, f.relation) for f in report.findings],
    }


def dumped(golden: Any, mine: Any, work: Callable[[Any], object], **options: Any) -> Any:
    runs = [
        record(model, lambda model=model: work(model), name, **options)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    return ld.compare(*runs, progress=False)


def hooks(*several: torch.nn.Module) -> list[int]:
    return [
        len(part._forward_hooks) + len(part._forward_pre_hooks)
        for model in several
        for part in model.modules()
    ]


def lockstep_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("llmdebug lockstep")]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert lockstep_threads() == []
