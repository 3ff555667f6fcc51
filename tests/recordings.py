"""Record and compare in one line each, and the verdicts that two equal programs may get."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import llmdebug_nb as ld

# Two kernels for one formula may or may not give the same bits: that depends on the processor,
# the number of threads and the library. Bits are compared only where the same kernel runs on the
# same shapes in the same environment.
AGREED = frozenset({"match", "within_noise"})


def record(model: Any, work: Callable[[], object], name: str = "r", **options: Any) -> Any:
    """Record ``model`` while ``work`` runs, all steps unless the options name others."""
    with ld.dump(model, **{"name": name, "tokens": "all", **options}) as run:
        work()
    assert run.info()["complete"], run.info()
    return run


def recorded(model: Any, *inputs: Any, name: str = "r", **options: Any) -> Any:
    """Record one call of ``model``, without gradients."""
    with torch.no_grad(), ld.dump(model, name=name, **options) as run:
        model(*inputs)
    return run


def recorded_both(
    golden: Any, mine: Any, work: Callable[[Any], object], **options: Any
) -> list[Any]:
    """Record what ``work`` does with each of two models."""
    models = {"golden": golden, "mine": mine}
    return [record(each, lambda m=each: work(m), name, **options) for name, each in models.items()]


def compared(golden: Any, mine: Any, *inputs: Any, **options: Any) -> ld.Report:
    """Record one call of each of two models on the same inputs, and compare."""
    with torch.no_grad():
        return ld.compare(
            *recorded_both(golden, mine, lambda model: model(*inputs), **options), progress=False
        )


def scaled(path: str, factor: float) -> Callable[[Any], object]:
    """Return a change of a model that multiplies the output of one of its modules."""
    return lambda model: model.get_submodule(path).register_forward_hook(
        lambda _module, _args, out: out * factor
    )


def record_linear(folder: Path, name: str, scale: float = 1.0) -> Path:
    """Record one call of a linear layer and a ReLU below ``folder``; return the run's folder."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with torch.no_grad():
        model[0].weight *= scale
    place = str(folder / "llmdebug_runs")
    run = record(model, lambda: model(torch.ones(2, 4)), name, path=place)
    assert run.path is not None
    return run.path


def change_index(folder: Path, sql: str, *values: object) -> None:
    """Change the index of a written run, or of one of its processes."""
    with contextlib.closing(sqlite3.connect(next(folder.rglob("index.sqlite")))) as db, db:
        if values:
            db.execute(sql, values)
        else:
            db.executescript(sql)


def add_process(run: Path, name: str) -> Path:
    """Add a copy of a written run's process, such as ``rank1_77``; return its folder."""
    second = shutil.copytree(next(run.glob("rank*")), run / name)
    rank, _, pid = name.removeprefix("rank").partition("_")
    for key, value in (("rank", rank), ("pid", pid)):
        change_index(second, "UPDATE meta SET value = ? WHERE key = ?", value, key)
    return second


def graph_filters(space: str) -> list[tuple[dict[str, Any], Callable[[Any], bool]]]:
    """Return options of recordings of an exported Llama, and which records each keeps.

    ``space``: of its operators, such as ``Onnx``.
    """
    return [
        ({"layers": "model.layers.0.mlp"}, lambda r: r.site.path.startswith("model.layers.0.mlp")),
        ({"apis": "MatMul"}, lambda r: "/" not in r.site.path or r.op == f"{space}.MatMul"),
        (
            {"apis": f"!{space}.Add", "mode": "api"},
            lambda r: "/" in r.site.path and r.op != f"{space}.Add",
        ),
        ({"part": "out"}, lambda r: r.site.role == "output"),
        ({"tokens": "1"}, lambda r: r.site.step == 1),
        ({"logits": True}, lambda r: r.site.path == "lm_head"),
        ({"stats_only": True}, lambda r: r.payload is None),
        ({"slice": "0"}, lambda r: r.kept == "slice[0]" or r.summary.shape == ()),
    ]


def boundaries(report):
    """Return the paths of golden's module outputs: those with a partner, those without."""
    rows = [
        d
        for d in report.differences
        if d.pair.golden and "/" not in d.site.path and d.site.role == "output"
        if d.pair.elsewhere != "mine"  # a further tensor of mine that is like it
    ]
    alone = {d.site.path for d in rows if d.verdict == "unmatched"}
    return {d.site.path for d in rows} - alone, alone
