"""The seam of the writers: what each is given, and what it counts.

A writer is a function ``write(dump, folder, written)`` in the module of its layout. It writes into
an empty folder, and counts what it leaves out, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.core.errors import StoreError, TensorLookupError, saving
from llmdebug_nb.core.records import CallKey, Frame, Node, Record, Site

if TYPE_CHECKING:
    import torch

Load: TypeAlias = "Callable[[Record], torch.Tensor]"
Stack: TypeAlias = "Callable[[CallKey], Sequence[tuple[Frame, str]]]"
Writer: TypeAlias = "Callable[[Dump, Path, Written], None]"


@dataclass(frozen=True)
class Dump:
    """What is written. ``names``: the node of a record in its graph, None if it is none.

    ``begun``: when the run began, in seconds since 1970. ``stack``: the lines that led to a call,
    innermost first, each with its code.
    """

    records: Sequence[Record]
    nodes: Sequence[Node]
    load: Load
    names: Callable[[Record], str | None]
    model: str = "model"
    begun: float = 0.0
    stack: Stack = lambda key: ()


@dataclass
class Written:
    """``tensors``: the number written with values; ``described``: with statistics alone.

    ``left_out``: the numbers left out, by reason.
    """

    folder: Path
    tensors: int = 0
    described: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def write(writer: Writer, dump: Dump, folder: Path) -> Written:
    """Write a dump to a new folder.

    Raises:
        StoreError: the folder is not empty, can't be written to, or nothing can be written to it.
    """
    written = Written(folder)
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StoreError(
                f"{folder} is not empty: name a new folder, so that no two dumps are mixed up"
            )
        writer(dump, folder, written)
    if not written.tensors + written.described:
        reasons = [f"{count:,} {reason}" for reason, count in written.left_out.items()]
        why = "; ".join(reasons) or "the run has no tensor for this layout"
        raise StoreError(f"nothing was written to {folder}: {why}")
    return written


def kept(dump: Dump, written: Written, reasons: Callable[[Record], str | None]) -> Iterator[Record]:
    """Yield the records that a layout has a place for; ``reasons``: why it has none for one."""
    for record in dump.records:
        if (why := record.lost or reasons(record)) is not None:
            written.left_out[why] += 1
        else:
            yield record


def later(site: Site) -> str | None:
    """Return why layouts that know tokens alone have no place for a site, or None."""
    return "of a later or earlier generation" if site.generation else None


def loaded(record: Record, load: Load, written: Written) -> torch.Tensor | None:
    """Return the values of a record; count it as left out if there are none."""
    if record.payload is None or record.kept is not None:
        written.left_out["whose values were not kept"] += 1
        return None
    try:
        return load(record)
    except (StoreError, TensorLookupError) as error:
        written.left_out[str(error)] += 1
        return None
