"""Names, counts, sizes and dates in words."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from llmdebug_nb.core.findings import EXPECTED, Difference


def made_text(run: Any) -> str:
    """Return when and with which versions a run was recorded."""
    created = run.meta.get("created")
    when = (
        f" recorded {datetime.fromtimestamp(created):%Y-%m-%d %H:%M:%S}"
        if isinstance(created, (int, float))
        else ""
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in (run.meta.get("environment") or {}).items()
    )
    return (
        f"{run.label}:{when}{' with ' + versions if versions else ''}"
        if when or versions
        else f"{run.label}: {run.path or 'in memory'}"
    )


def labels(golden: Any, mine: Any) -> tuple[str, str]:
    """Return what two runs are called beside each other: where both have one name, with the folder that they are in."""
    both = golden.label, mine.label
    if both[0] != both[1] or golden.path is None or mine.path is None or golden.path == mine.path:
        return both
    return f"{golden.path.parent.name}/{both[0]}", f"{mine.path.parent.name}/{both[1]}"


def expected_text(row: Difference) -> str:
    """Return what is said of a row that is expected, "" of another."""
    if row.verdict != EXPECTED:
        return ""
    return (row.expected.comment or str(row.expected)) if row.expected else row.reason or ""


def count_text(count: int, noun: str) -> str:
    """Return ``1 step``, ``1,234 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(nbytes: int) -> str:
    """Return a size for people: ``12.3 MB`` (1 MB is 10**6 bytes)."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
