"""Names, counts, sizes and dates as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmdebug_nb.comparison.differences import Difference
    from llmdebug_nb.store.run import Run


def made_text(run: Run) -> str:
    """Return when and with which versions a run was recorded."""
    from datetime import datetime

    from llmdebug_nb.core.places import shown

    created, text = run.meta.get("created"), ""
    if isinstance(created, (int, float)):
        text = f" recorded {datetime.fromtimestamp(created):%Y-%m-%d %H:%M:%S}"
    environment = run.meta.get("environment") or {}
    if environment:
        text += " with " + ", ".join(f"{name} {one}" for name, one in environment.items())
    if run.meta.get("redacted"):
        text += ", redacted: without values, sources and strings"
    place = text or f" {shown(run.where or 'in memory')}"
    return f"{run.label}:{place}"


def labels(golden: Run, mine: Run) -> tuple[str, str]:
    """Return the names of two runs; if they are equal, with their folders."""
    both = golden.label, mine.label
    if both[0] != both[1] or golden.path is None or mine.path is None or golden.path == mine.path:
        return both
    folders = (PurePath(run.where).parent.name for run in (golden, mine))
    first, second = (f"{place}/{label}" for place, label in zip(folders, both, strict=True))
    return first, second


def expected_text(row: Difference) -> str:
    """Return why a row is expected, "" if it is not."""
    from llmdebug_nb.comparison.differences import EXPECTED

    if row.verdict != EXPECTED:
        return ""
    return (row.expected.comment or str(row.expected)) if row.expected else row.reason or ""


def error_text(row: Difference) -> str:
    """Return the error of a row that differs, or why it has none."""
    if row.reason and not row.metrics:
        return row.reason
    return f"error {row.error:.2g} ({row.reason or 'relative L2'})"


def count_text(count: int, noun: str) -> str:
    """Return ``1 step``, ``1,234 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(nbytes: int) -> str:
    """Return a size in decimal units: ``12.3 MB``."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def verdicts_text(differences: Sequence[Difference], hidden: bool) -> str:
    """Return how many rows have each verdict. ``hidden``: the values of no row show a finding."""
    from llmdebug_nb.comparison.differences import EXPECTED

    counts = Counter(d.verdict for d in differences)
    compared = len(differences) - counts["unmatched"]
    parts = [f"{counts['match']:,} identical", f"{counts['within_noise']:,} within noise"]
    why = " (the findings are differences that the values do not show)" if hidden else ""
    parts.append(f"{counts['diverged']:,} diverged{why}")
    if counts[EXPECTED]:
        parts.append(f"{counts[EXPECTED]:,} as expected")
    line = f"{count_text(compared, 'pair')}: {', '.join(parts)}"
    if not counts["unmatched"]:
        return line
    reasons = Counter(
        (d.reason or "").partition(": bytes")[0] for d in differences if d.verdict == "unmatched"
    )
    named = "; ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(2))
    return f"{line}; {count_text(counts['unmatched'], 'row')} without a partner ({named})"
