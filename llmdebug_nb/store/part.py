"""What one process wrote of a run. The launcher of a program needs this, and little else."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """The part of one process. ``folder``: its name. ``ended_by``: why it ended early."""

    folder: str
    rank: str
    bytes: int
    records: int | None
    complete: bool
    ended_by: str | None

    @classmethod
    def of(cls, told: object) -> Part | None:
        """Return what a process has told; None if it is no part: anybody may write there."""
        kinds = str, str, int, int | None, bool, str | None
        if not isinstance(told, list) or len(told) != len(kinds):
            return None
        fits = all(isinstance(each, kind) for each, kind in zip(told, kinds, strict=True))
        return cls(*told) if fits else None
