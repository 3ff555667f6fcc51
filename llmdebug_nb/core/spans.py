"""Whole numbers as spans: ``0-6, 9``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmdebug_nb.core import constants

Span = tuple[int, int]  # the first and the last number


def of(numbers: Iterable[int]) -> list[Span]:
    """Return the spans of rising numbers."""
    found: list[Span] = []
    for number in numbers:
        if found and found[-1][1] >= number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def text(spans: Sequence[Span]) -> str:
    """Return ``0-6, 9``; of many spans the first few, and how many numbers are in all."""
    words = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    count = sum(last - first + 1 for first, last in spans)
    more = f", … ({count:,} in all)" if len(words) > constants.INDICES_SHOWN else ""
    return ", ".join(words[: constants.INDICES_SHOWN]) + more


def text_of(numbers: Iterable[int]) -> str:
    """Return rising numbers as the text of their spans."""
    return text(of(numbers))
