"""The launch configuration of fused kernels.

It is read from the C++ that Inductor wrote, or from the recorded launcher of a Triton kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

COLUMNS = (
    "kernel", "language", "arguments", "loops", "vector", "threads", "grid", "block", "warps",
    "stages", "registers", "spills", "shared",
)  # fmt: skip
_CAST = r"(?:static_cast<int64_t>\()?"
_LOOP = re.compile(
    rf"for\s*\(\s*int64_t\s+(?P<name>\w+)\s*=\s*{_CAST}(?P<low>[^;]*?)\)?;"
    rf"\s*(?P=name)\s*<\s*{_CAST}(?P<high>[^;]*?)\)?;"
    rf"\s*(?P=name)\s*\+=\s*{_CAST}(?P<step>[^;{{}}]*?)\)?\s*\)\s*$"
)
_PARALLEL = re.compile(r"#pragma omp parallel\b(?:.*num_threads\((\d+)\))?")
_SIGNATURE = re.compile(r'extern "C"[^(]*\((?P<arguments>[^)]*)\)')
_MOST = 200  # loops that are read of one kernel


def rows(
    kernels: Iterable[tuple[str, str]], noted: Iterable[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return one dict of `COLUMNS` for each kernel; absent figures are None.

    ``threads`` is "all" if OpenMP decides. ``kernels``: name and source. ``noted``: name and
    configuration (JSON) of the kernels whose launcher was recorded.
    """
    seen = {name: _configuration(text) for name, text in noted}
    found = [{**_source(name, source), **seen.pop(name, {})} for name, source in kernels if source]
    found += [
        {**dict.fromkeys(COLUMNS), "kernel": name, **configuration}
        for name, configuration in seen.items()
    ]
    return [{column: row.get(column) for column in COLUMNS} for row in found]


def _source(name: str, source: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"kernel": name, "language": "cpp" if 'extern "C"' in source else "triton"}
    if row["language"] != "cpp":
        return row
    signature = _SIGNATURE.search(source)
    parts = signature["arguments"].split(",") if signature else []
    arguments = [" ".join(part.split()) for part in parts]
    parallel = _PARALLEL.search(source)
    return row | {
        "arguments": [part for part in arguments if part],
        "loops": loops(source),
        "vector": vector(source),
        "threads": 1 if parallel is None else int(parallel[1]) if parallel[1] else "all",
    }


def loops(source: str) -> list[str]:
    """Return the loops of a C++ kernel as ``x0: 0 to 64 by 16``, indented by their nesting."""
    found: list[str] = []
    depth, around = 0, list[int]()
    for line in source.splitlines():
        loop = _LOOP.match(line.strip())
        if loop is not None and len(found) < _MOST:
            bounds = (_plain(loop[part]) for part in ("low", "high", "step"))
            found.append("  " * len(around) + "{}: {} to {} by {}".format(loop["name"], *bounds))
            around.append(depth)
        depth += line.count("{") - line.count("}")
        while around and depth <= around[-1] and "}" in line:
            around.pop()
    return found


def _plain(text: str) -> str:
    """Return ``64`` for ``64L`` and ``(64L)``; other expressions are returned unchanged."""
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1]
    return re.sub(r"\b(\d+)L\b", r"\1", text)


def vector(source: str) -> int:
    """Return the vector width of a C++ kernel: the widest step of its loops; 1 for scalar code."""
    steps = (line.rpartition(" ")[2] for line in loops(source))
    widths = [int(step) for step in steps if step.isdigit()]
    return max(widths, default=1) if "Vectorized<" in source else 1


def _configuration(text: str) -> dict[str, Any]:
    try:
        noted = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return {}
    if not isinstance(noted, dict):
        return {}
    return {name: noted[name] for name in COLUMNS[1:] if name in noted}
