"""What fuzzing does with a dump, and what it asks views and kernels: all that a user does."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

import llmdebug_nb as ld
from llmdebug_nb.app import runs as app_runs
from llmdebug_nb.notebook import desk
from llmdebug_nb.notebook.bridge import check_request
from llmdebug_nb.show import wire_requests
from llmdebug_nb.show.run_view import RunView


def tour(path: Path, golden: Path, out: Path, rng: random.Random) -> None:
    """Do with a dump all that a user does. The first error of ours ends a stage, not the tour."""
    run = ld.open_run(path)
    stages: list[Callable[[], object]] = [
        run.info, lambda: repr(run), lambda: app_runs.describe_run(run), run.to_pandas, run.scalars,
        run.operators, run.ops, run.kernels, run.host, run.tiling, run.steps, run.ids,
        lambda: [run.stack(key) for key in list(run.operators()["path"])[:5]],
        lambda: [run.id_of(record.site) for record in run.records(n=20)],
        lambda: run.find("nowhere"), lambda: str(ld.topology(run)),
        lambda: ld.topology(run).to_json(), lambda: ld.timeline(run),
    ]  # fmt: skip
    stages += [lambda r=record: run.load(r) for record in _some(run)]
    stages += [lambda: _listed(path.parent), lambda: _views(RunView(run), rng, out)]
    if rng.random() < 0.4:  # takes most of the time
        stages.append(lambda: _compared(run, golden, rng, out))
    for stage in stages:
        with contextlib.suppress(ld.LLMDebugError):
            stage()


def _some(run: ld.Run) -> list[Any]:
    with contextlib.suppress(ld.LLMDebugError):
        return list(run.records(n=60))
    return []


def _compared(run: ld.Run, golden: Path, rng: random.Random, out: Path) -> None:
    report = ld.compare(golden, run, progress=False)
    for look in (
        lambda: str(report),
        lambda: report.to_html(out / "report.html"),
        lambda: _views(report.view(), rng, out),
    ):
        with contextlib.suppress(ld.LLMDebugError):
            look()


def _views(view: Any, rng: random.Random, out: Path) -> None:
    if rng.random() < 0.3:
        kind = rng.choice(("html", "svg"))
        with contextlib.suppress(ld.LLMDebugError):
            ld.export(view.run if isinstance(view, RunView) else view._report, out / f"p.{kind}")
    for op in rng.sample(sorted(wire_requests.ANSWERS), 8):
        with contextlib.suppress(ld.LLMDebugError):
            ask(view, request_of(rng, op))


def _listed(folder: Path) -> None:
    rows = desk.Desk(folder.parent).runs({"op": "runs", "folders": [""], "name": folder.name})
    json.dumps(rows, allow_nan=False)


def request_of(rng: random.Random, op: str) -> dict[str, Any]:
    """Return a message that the wire types describe, with small numbers and texts."""
    kind = wire_requests.ANSWERS[op][0]
    return {"op": op} | {
        name: _value(rng, hint) for name, hint in get_type_hints(kind).items() if name != "op"
    }


def _value(rng: random.Random, hint: Any) -> Any:
    if hint is int:
        return rng.choice((-1, 0, 0, 1, 2, 5, 20, 1 << 40, 1 << 62, 1 << 70))
    if hint is bool:
        return rng.random() < 0.5
    if hint is str:
        return rng.choice(("", "0", "0.up", "nan>0", "abs>1", "id:0_1", "x y", "%_\\", "min<=1e9"))
    if hint in (list[int], list[float]):
        return [_value(rng, int) for _ in range(rng.randrange(4))]
    return rng.choice(get_args(hint)) if get_args(hint) else None


def ask(view: Any, message: Any) -> None:
    """Answer a message as `Bridge.answer` does, which hides the errors that are not ours."""
    request = check_request(message)
    answer = getattr(view, request["op"])(request)
    parts = answer if isinstance(answer, tuple) else (answer, [])
    msgspec.convert(parts[0], wire_requests.ANSWERS[request["op"]][1])
    json.dumps(parts[0], allow_nan=False).encode()
