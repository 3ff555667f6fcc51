"""Shared by the tests of the foreign layouts: valid and hostile files."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llmdebug_nb.core.records import Record
from llmdebug_nb.store.layouts import Contents, Layout

X = torch.arange(6.0).reshape(2, 3)


def save(value: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)
    return file


def write(file: Path, data: bytes | str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data if isinstance(data, bytes) else data.encode())
    return file


def read(layout: Layout, path: Path) -> Contents:
    """Return what a layout's reader finds, with all tensors read."""
    contents = layout.read(path)
    return replace(contents, records=list(map(contents.describe, contents.records)))


def at(
    contents: Contents, path: str, role: str = "output", slot: str = "0", step: int = 0, **more: Any
) -> Record:
    """Return the one record of a site."""
    wanted = {"path": path, "role": role, "slot": slot, "step": step, **more}
    found = [
        r
        for r in contents.records
        if all(getattr(r.site, name) == value for name, value in wanted.items())
    ]
    assert len(found) == 1, (wanted, [str(r.site) for r in contents.records])
    return found[0]


def paths(contents: Contents) -> list[str]:
    return list(dict.fromkeys(record.site.path for record in contents.records))


def check_numbering(contents: Contents) -> None:
    numbers = list(range(len(contents.records)))
    assert [r.id for r in contents.records] == numbers
    assert [r.seq for r in contents.records] == numbers


EXAMPLE = (
    b"$Version=1.0\n$Object.Count=1\n$Object.Length=24\nformat=2\ndtype=0\ndims=2,"
    b"3\n$Object.data=0,24\n$End=1\n" + struct.pack("<6f", *range(6))
)


def torch_bytes(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()
