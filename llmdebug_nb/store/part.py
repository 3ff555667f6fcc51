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
