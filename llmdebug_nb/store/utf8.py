"""Texts that UTF-8 can't hold: half of a surrogate pair, as for a file name of another encoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def storable(rows: Iterable[Sequence[object]]) -> Iterator[Sequence[object]]:
    """Yield rows with escapes in place of what UTF-8 can't hold."""
    for row in rows:
        yield tuple(_text(cell) if isinstance(cell, str) else cell for cell in row)


def _text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
