"""Profiles that ONNX Runtime writes (``SessionOptions.enable_profiling``), as rows of kernels.

A profile is a JSON list of Chrome trace events. Events of category ``Node`` whose name ends in
``_kernel_time`` are executed nodes; ``model_run`` events of category ``Session`` are calls of
`run`. ``ts`` and ``dur`` are in microseconds.
https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from llmdebug_nb.core.columns import Row
from llmdebug_nb.core.errors import CorruptDumpError

_LARGEST = 1 << 30  # bytes
_LONGEST = 1e15  # microseconds
_SUFFIX = "_kernel_time"
_DTYPES = {"float": "float32", "double": "float64"}
_CPU = "CPUExecutionProvider"
Event = Mapping[str, object]


def launches(path: str | os.PathLike[str]) -> list[tuple[int, Row]]:
    """Return the executed nodes, ordered by start: the number of the `run` call and a row.

    Rows are in the order of `columns.LAUNCHES` without ``id`` and ``root_call``. ``path`` is ``/``
    and the node's name, ``op`` its type, ``device`` cpu or the provider's name. ``start`` counts
    from the beginning of the `run` call.

    Raises:
        CorruptDumpError: the file can't be read or is not such a profile. A truncated list, for
            example of a killed process, is read as far as it goes.
    """
    file = Path(path)
    events = [event for event in _events(file) if isinstance(event, dict)]
    runs = sorted(_span(event, file) for event in events if _is_run(event))
    starts = [start for start, _ in runs]
    nodes = []
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") != "Node" or not name.endswith(_SUFFIX):
            continue
        start, duration = _span(event, file)
        run = max(0, bisect.bisect_right(starts, start) - 1)
        since = max(0, start - (starts[run] if starts else 0))
        nodes.append((run, since, duration, name.removesuffix(_SUFFIX), _arguments(event)))
    nodes.sort(key=lambda node: node[:2])
    counts: Counter[tuple[int, str]] = Counter()
    rows = []
    for run, since, duration, node, arguments in nodes:
        rows.append((run, _row(node, counts[run, node], arguments, since, duration)))
        counts[run, node] += 1
    return rows


def _is_run(event: Event) -> bool:
    return event.get("cat") == "Session" and event.get("name") == "model_run"


def _row(node: str, number: int, arguments: Event, start: int, duration: int) -> Row:
    op, provider = (str(arguments.get(name) or "") for name in ("op_name", "provider"))
    on_cpu = provider in ("", _CPU)
    device = "cpu" if on_cpu else provider.removesuffix("ExecutionProvider").lower()
    inputs, outputs = (
        _tensors(arguments.get(f"{role}_type_shape")) for role in ("input", "output")
    )
    call = [f"/{node}", number, "forward", op, f"{op}:{node}", None]
    return [*call, device, 0, start, duration, inputs, outputs]


def _tensors(shapes: object) -> str | None:
    """Convert ``[{"float": [2, 3]}]`` to the form of `columns.LAUNCHES`."""
    if not isinstance(shapes, list):
        return None
    pairs = [pair for one in shapes if isinstance(one, dict) for pair in one.items()]
    tensors = [(_DTYPES.get(kind, kind), shape) for kind, shape in pairs if isinstance(shape, list)]
    return json.dumps(tensors) if tensors else None


def _arguments(event: Event) -> Event:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _span(event: Event, file: Path) -> tuple[int, int]:
    """Return start and duration in nanoseconds."""
    return _time(event, "ts", file), max(0, _time(event, "dur", file))


def _time(event: Event, name: str, file: Path) -> int:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        value = math.nan
    if abs(value) <= _LONGEST:  # false for NaN
        return int(value * 1000)
    what = f"{name!r} of the event {str(event.get('name'))[:60]!r}"
    raise CorruptDumpError(f"{file}: {what} is not a time ({str(value)[:40]!r})")


def _events(file: Path) -> list[object]:
    try:
        size = file.stat().st_size
        if size > _LARGEST:
            limit = "too large for a profile of ONNX Runtime (at most 1 GiB)"
            raise CorruptDumpError(f"{file} has {size:,} bytes: {limit}")
        text = file.read_text(encoding="utf-8").strip()
        try:
            events = json.loads(text)
        except ValueError:  # the list is only closed together with the session
            events = json.loads(text[: text.rfind("}") + 1].rstrip(",") + "]")
    except FileNotFoundError:
        hint = "session.end_profiling() returns the name of the profile"
        raise CorruptDumpError(f"{file}: no such file; {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = f"not a profile of ONNX Runtime: {str(error)[:100]}"
        raise CorruptDumpError(f"{file} is {why}") from None
    if not isinstance(events, list):
        raise CorruptDumpError(
            f"{file} is not a profile of ONNX Runtime: expected a list of events"
        )
    return events
