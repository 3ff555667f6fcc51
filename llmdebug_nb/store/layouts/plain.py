"""Plain tensor files, one or a folder of them.

They are ``.npy``, ``.npz``, ``.pt``, ``.pth`` and ``.safetensors``. A file with one tensor becomes
an output at the file's path without its ending. A file with named tensors becomes one record for
each, at its name; if several files have that name, the file's path is put before it.
"""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from llmdebug_nb.core.errors import CorruptDumpError, MissingPackageError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.core.records import Site
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.files import (
    Draft,
    Folder,
    Place,
    check_members,
    checked,
    contents,
    from_array,
    missing,
    read_npy,
    read_object,
    reading,
    tensors_in,
)

NAME = "files"

_SUFFIXES = frozenset((".npy", ".npz", ".pt", ".pth", ".safetensors"))
_RAW = ".bin"


def _is_tensor_file(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in _SUFFIXES


def detect(path: Path) -> bool:
    """Tell whether ``path`` is a tensor file, or a folder with at least one in it or below."""
    if path.is_file():
        return _is_tensor_file(path.name)
    return path.is_dir() and any(_is_tensor_file(name) for name in Folder(path).scan())


def read(path: Path) -> Contents:
    """Read plain tensor files (NumPy, ``torch.save``, safetensors).

    A file that can't be read becomes a record with the reason.

    Raises:
        CorruptDumpError: no file can be read.
    """
    left_out: dict[str, str] = {}
    if path.is_file():
        folder = Folder(path.resolve().parent)
        names = [path.resolve().name]
    else:
        folder = Folder(path)
        every, left_out = folder.walk()
        names = [name for name in every if _is_tensor_file(name)]
        for name in every:
            if name.lower().endswith(_RAW):
                left_out[name] = f"{name} has bytes alone: save the tensor as .npy, with its dtype"
    drafts = [missing(name, why) for name, why in left_out.items()]
    files_of: dict[str, set[str]] = defaultdict(set)
    for name in tqdm(names, desc=f"reading {path.name}", unit=" files", delay=1, leave=False):
        for draft in _drafts(folder, name):
            if draft.place is not None:
                files_of[draft.site.path].add(name)
            drafts.append(draft)
    drafts = [
        _with_file_name(draft) if len(files_of.get(draft.site.path, ())) > 1 else draft
        for draft in drafts
    ]
    return contents(folder, drafts, lambda place: _load(folder, place))


def _with_file_name(draft: Draft) -> Draft:
    if draft.place is None:
        return draft
    file, key = draft.place.file, draft.place.key
    path = file if key is None else f"{_stem(file)}/{draft.site.path}"
    return replace(draft, site=replace(draft.site, path=path))


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(""))


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of a file; ``get()`` reads it. ``path``, ``slot``: of its record."""

    key: str | int | None
    path: str
    slot: str
    get: Callable[[], torch.Tensor]


def _drafts(folder: Folder, name: str) -> Iterator[Draft]:
    """Yield a record for each tensor of a file, or one with the reason why it can't be read."""
    found = False
    try:
        for item in _items(folder, name):
            found, site = True, Site(item.path, slot=item.slot)
            try:
                with reading(name):
                    tensor = checked(folder, name, item.get())
                yield Draft(site, place=Place(name, item.key), summary=summarize(tensor))
            except CorruptDumpError as error:
                yield Draft(site, lost=str(error))
        if not found:
            raise CorruptDumpError(f"{name} holds no tensor")
    except CorruptDumpError as error:
        yield Draft(Site(_stem(name)), lost=str(error))


def _load(folder: Folder, place: Place) -> torch.Tensor:
    for item in _items(folder, place.file, mapped=place.key is not None):
        if item.key == place.key:
            with reading(place.file):
                # a copy: a mapped tensor would change or vanish with the file
                return checked(folder, place.file, item.get()).clone()
    raise CorruptDumpError(f"{place.file} no longer holds tensor {place.key!r}")


def _items(folder: Folder, name: str, mapped: bool = False) -> Iterator[_Item]:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix == ".npy":
        yield _Item(None, _stem(name), "0", lambda: read_npy(folder, name))
    elif suffix == ".npz":
        yield from _npz(folder, name)
    elif suffix == ".safetensors":
        yield from _safetensors(folder, name)
    else:
        yield from _pickled(name, read_object(folder, name, mapped))


def _pickled(name: str, value: object) -> Iterator[_Item]:
    """Yield the tensors of a saved object.

    It may be a tensor, a sequence (its slots are numbered) or a dict (its paths are named).
    """
    for number, (keys, tensor) in enumerate(tensors_in(name, value)):
        get = partial(torch.Tensor.detach, tensor)
        if not keys:
            yield _Item(None, _stem(name), "0", get)
        elif isinstance(value, Mapping):
            yield _Item(number, ".".join(keys), "0", get)
        else:
            yield _Item(number, _stem(name), ".".join(keys), get)


def _npz(folder: Folder, name: str) -> Iterator[_Item]:
    file = folder.file(name)
    with reading(name), zipfile.ZipFile(file) as archive:
        check_members(name, archive, file.stat().st_size)
    with reading(name):
        arrays = np.load(file, allow_pickle=False)
    with arrays:
        for key in arrays.files:
            yield _Item(key, key, "0", partial(_member, arrays, key))


def _member(arrays: Mapping[str, Any], key: str) -> torch.Tensor:
    return from_array(arrays[key])


def _safetensors(folder: Folder, name: str) -> Iterator[_Item]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingPackageError(
            f"{name} needs safetensors, which is not installed: pip install safetensors"
        ) from None
    with reading(name):
        stored = safe_open(folder.file(name), framework="pt")
    with stored:
        names: list[str] = stored.keys()  # type: ignore[no-untyped-call]
        for key in names:
            yield _Item(key, key, "0", partial(stored.get_tensor, key))
