"""The profile that ONNX Runtime writes (``SessionOptions.enable_profiling``), as rows of kernels.

A JSON list of Chrome trace events; those of category ``Node`` whose name ends in ``_kernel_time`` are nodes that ran, those called ``model_run`` of category
``Session`` are calls of `run`. ``ts`` and ``dur`` are microseconds. https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import CorruptDumpError

_MOST = 1 << 30  # bytes
_SUFFIX = "_kernel_time"
_DTYPES = {"float": "float32", "double": "float64"}
_CPU = "CPUExecutionProvider"


def launches(path: str | os.PathLike[str]) -> list[tuple[int, list[Any]]]:
    """Return what ran, in order of its start: the number of the `run` call, and a row as `records.LAUNCH` has it without ``id`` and ``root_call``.

    ``path`` of a row is ``/`` and the node's name, ``op`` its type, ``device`` cpu or the provider's name. ``start`` counts from the beginning of the call.

    Raises:
        CorruptDumpError: the file is no such profile, or can't be read. A list that was cut short, as by a process that was killed, is
            read as far as it goes.
    """
    file = Path(path)
    events = [event for event in _events(file) if isinstance(event, dict)]
    runs = sorted(
        _span(event, file)
        for event in events
        if event.get("cat") == "Session" and event.get("name") == "model_run"
    )
    starts = [start for start, _ in runs]
    found = []
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") != "Node" or not name.endswith(_SUFFIX):
            continue
        start, duration = _span(event, file)
        at = max(0, bisect.bisect_right(starts, start) - 1)
        began = starts[at] if starts else 0
        found.append(
            (at, [name.removesuffix(_SUFFIX), _arguments(event), max(0, start - began), duration])
        )
    found.sort(key=lambda one: (one[0], one[1][2]))
    return _numbered(found)


def _numbered(found: list[tuple[int, list[Any]]]) -> list[tuple[int, list[Any]]]:
    counts: Counter[tuple[int, str]] = Counter()
    rows: list[tuple[int, list[Any]]] = []
    for at, (node, arguments, start, duration) in found:
        op, provider = (str(arguments.get(name) or "") for name in ("op_name", "provider"))
        device = (
            "cpu" if provider in ("", _CPU) else provider.removesuffix("ExecutionProvider").lower()
        )
        number = counts[at, node]
        counts[at, node] += 1
        tensors = (
            _tensors(arguments.get(name)) for name in ("input_type_shape", "output_type_shape")
        )
        rows.append(
            (
                at,
                [
                    f"/{node}",
                    number,
                    "forward",
                    op,
                    f"{op}:{node}",
                    None,
                    device,
                    0,
                    start,
                    duration,
                    *tensors,
                ],
            )
        )
    return rows


def _tensors(said: Any) -> str | None:
    """Return ``[{"float": [2, 3]}]`` as `records.LAUNCH` has it."""
    pairs = (
        [item for one in said if isinstance(one, dict) for item in one.items()]
        if isinstance(said, list)
        else []
    )
    found = [
        (_DTYPES.get(dtype, dtype), shape) for dtype, shape in pairs if isinstance(shape, list)
    ]
    return json.dumps(found) if found else None


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _span(event: Mapping[str, Any], file: Path) -> tuple[int, int]:
    """Return start and duration in nanoseconds."""
    numbers = []
    for name in ("ts", "dur"):
        value = event.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or abs(value) > 1e15
        ):
            raise CorruptDumpError(
                f"{file}: {name!r} of the event {str(event.get('name'))[:60]!r} is no time ({str(value)[:40]!r})"
            )
        numbers.append(int(value * 1000))
    return numbers[0], max(0, numbers[1])


def _events(file: Path) -> list[Any]:
    try:
        size = file.stat().st_size
        if size > _MOST:
            raise CorruptDumpError(
                f"{file} has {size:,} bytes: too large for a profile of ONNX Runtime (at most 1 GiB)"
            )
        text = file.read_text(encoding="utf-8").strip()
        try:
            events = json.loads(text)
        except ValueError:  # it is written event by event, and closed with the session
            events = json.loads(text[: text.rindex("}") + 1].rstrip(",") + "]")
    except FileNotFoundError:
        raise CorruptDumpError(
            f"{file}: there is no such file; session.end_profiling() gives the name of the profile"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptDumpError(
            f"{file} is no profile of ONNX Runtime: {str(error)[:100]}"
        ) from None
    if not isinstance(events, list):
        raise CorruptDumpError(f"{file} is no profile of ONNX Runtime: expected a list of events")
    return events
