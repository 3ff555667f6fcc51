"""Plain tensor files, one or a folder of them.

They are ``.npy``, ``.npz``, ``.pt``, ``.pth``, ``.safetensors``, and the ``.bin`` of `torch.save`
and of ATB; alone, also ``.onnx``.
A file with one tensor becomes an output at the file's path without its ending. A file with named
tensors becomes one record for each, at its name; if several files have that name, the file's path
is put before it.
"""

from __future__ import annotations

import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from posixpath import splitext

import numpy as np
import torch

from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.dtypes import DTYPES
from llmdebug_nb.core.errors import CorruptDumpError, MissingPackageError
from llmdebug_nb.core.kernels.raw import dtype_name
from llmdebug_nb.core.printable import file_part
from llmdebug_nb.core.records import Site
from llmdebug_nb.store.layouts import atb_bin, onnx_file
from llmdebug_nb.store.layouts.contents import Contents
from llmdebug_nb.store.layouts.drafts import Draft, Place, contents, holds, missing
from llmdebug_nb.store.layouts.files import Folder, GivenFile, from_array, read_npy, reading
from llmdebug_nb.store.layouts.pickled import granted, is_saved, plain, read_object, tensors_in
from llmdebug_nb.store.layouts.writing import Dump, Written, kept, loaded

NAME = "files"

_SUFFIXES = frozenset((".npy", ".npz", ".pt", ".pth", ".safetensors"))
_RAW = ".bin"
_OF_NUMPY = frozenset(name for name in DTYPES if hasattr(np, "bool_" if name == "bool" else name))
_NUMPY_DIMENSIONS = 32  # of NumPy 1; NumPy 2 has 64
_MANY = 64  # tensors of a file: listing them takes longer than reading one


def _is_tensor_file(folder: Folder, name: str) -> bool:
    suffix = splitext(name)[1].lower()
    if suffix != _RAW:
        return suffix in _SUFFIXES
    try:
        return is_saved(folder.file(name)) or atb_bin.is_bin(folder.file(name))
    except CorruptDumpError:  # a link, a pipe
        return False


def _is_given(file: GivenFile) -> bool:
    return file.name.lower().endswith(onnx_file.SUFFIX) or _is_tensor_file(file, file.name)


def _given(path: Path) -> GivenFile:
    """Return a file by its own name, or by that of its target if only that is a tensor file's."""
    given = GivenFile(path)
    return given if _is_given(given) else GivenFile(path.resolve())


def detect(path: Path, names: Sequence[str]) -> bool:
    """Tell whether ``path`` is a tensor file, or a folder with at least one in it or below."""
    if path.is_file():
        return _is_given(_given(path))
    return holds(path, names, _is_tensor_file)


def read(path: Path) -> Contents:
    """Read plain tensor files (NumPy, ``torch.save``, safetensors), or one of ONNX.

    A file that can't be read becomes a record with the reason.

    Raises:
        CorruptDumpError: no file can be read.
    """
    left_out: dict[str, str] = {}
    folder: Folder
    if path.is_file():
        folder = given = _given(path)
        names = [given.name]
    else:
        folder = Folder(path)
        every, left_out = folder.walk()
        names = [name for name in every if _is_tensor_file(folder, name)]
        for name in {*every}.difference(names):
            if name.lower().endswith(_RAW):
                left_out[name] = f"{name} has bytes alone: save the tensor as .npy, with its dtype"
    drafts = [missing(name, why) for name, why in left_out.items()]
    files_of: dict[str, set[str]] = defaultdict(set)
    for name in progress_bar(names, desc=f"reading {path.name}", unit="file"):
        for draft in _drafts(folder, name):
            if draft.place is not None:
                files_of[draft.site.path].add(name)
            drafts.append(draft)
    drafts = [
        _with_file_name(draft) if len(files_of.get(draft.site.path, ())) > 1 else draft
        for draft in drafts
    ]
    return contents(folder, drafts, _Reader(folder).load)


def _with_file_name(draft: Draft) -> Draft:
    if draft.place is None:
        return draft
    file, key = draft.place.file, draft.place.key
    path = file if key is None else f"{_stem(file)}/{draft.site.path}"
    return replace(draft, site=replace(draft.site, path=path))


def _stem(name: str) -> str:
    return splitext(name)[0]


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of a file; ``get()`` reads it. ``path``, ``slot``: of its record.

    ``claimed``: how many bytes an archive says that it unpacks to.
    """

    key: str | int | None
    path: str
    slot: str
    get: Callable[[], torch.Tensor]
    claimed: int = 0


def _drafts(folder: Folder, name: str) -> Iterator[Draft]:
    """Yield a record for each tensor of a file, or one with the reason why it can't be read."""
    found = False
    try:
        for item in _items(folder, name, mapped=True):
            found = True
            yield Draft(Site(item.path, slot=item.slot), place=Place(name, item.key))
        if not found:
            raise CorruptDumpError(f"{name} holds no tensor")
    except CorruptDumpError as error:
        yield Draft(Site(_stem(name)), lost=str(error))


class _Reader:
    """Reads the tensors of a folder again.

    It keeps a file of many tensors open, and a model: to find one, all of them have to be listed.
    ``_state``: the file's size and time of change, as a mapped file that was written anew must not
    be read.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._name, self._state = "", (0, 0)
        self._kept: dict[str | int | None, _Item] = {}

    def load(self, place: Place) -> torch.Tensor:
        """Return a copy of the tensor at a place. Raises CorruptDumpError."""
        name, key = place.file, place.key
        state = self._folder.file(name).stat()
        if (name, (state.st_size, state.st_mtime_ns)) == (self._name, self._state):
            items = self._kept
        else:
            self._name, self._kept = "", {}  # close the file before the next one is opened
            items = {item.key: item for item in _items(self._folder, name, key is not None)}
            if len(items) > _MANY or name.lower().endswith(onnx_file.SUFFIX):
                self._name, self._state = name, (state.st_size, state.st_mtime_ns)
                self._kept = items
        if key not in items:
            raise CorruptDumpError(f"{name} no longer holds tensor {key!r}")
        with reading(name):
            # a copy: a mapped tensor would change or vanish with the file
            return _read(self._folder, name, items[key]).clone()


def _read(folder: Folder, name: str, item: _Item) -> torch.Tensor:
    """Return the tensor of an item, if its bytes fit its file. Raises CorruptDumpError."""
    if item.claimed:
        folder.grant(name, item.key, item.claimed)
    return granted(folder, name, item.key, item.get())


def _items(folder: Folder, name: str, mapped: bool = False) -> list[_Item]:
    suffix = splitext(name)[1].lower()
    with reading(name):
        if suffix == ".npy":
            return [_Item(None, _stem(name), "0", lambda: read_npy(folder, name))]
        if suffix == ".npz":
            return _npz(folder, name)
        if suffix == ".safetensors":
            return _safetensors(folder, name)
        if suffix == onnx_file.SUFFIX:
            stored = enumerate(onnx_file.tensors(folder, name))
            return [_Item(number, each.name, "0", each.get) for number, each in stored]
        if suffix == _RAW and atb_bin.is_bin(folder.file(name)):
            return list(_of_atb(folder, name))
        return list(_pickled(folder, name, read_object(folder, name, mapped)))


def _pickled(folder: Folder, name: str, value: object) -> Iterator[_Item]:
    """Yield the tensors of a saved object.

    It may be a tensor, a sequence (its slots are numbered) or a dict (its paths are named).
    """
    size = folder.file(name).stat().st_size
    for number, (keys, tensor) in enumerate(tensors_in(name, value, size)):
        get = partial(plain, folder, name, tensor)
        if not keys:
            yield _Item(None, _stem(name), "0", get)
        elif isinstance(value, Mapping):
            yield _Item(number, ".".join(keys), "0", get)
        else:
            yield _Item(number, _stem(name), ".".join(keys), get)


def arrays(folder: Folder, name: str) -> dict[str, torch.Tensor]:
    """Return the arrays of a ``.npz`` by name. Raises CorruptDumpError, as `read` records it."""
    with reading(name):
        return {str(item.key): _read(folder, name, item) for item in _npz(folder, name)}


def _npz(folder: Folder, name: str) -> list[_Item]:
    archive = zipfile.ZipFile(folder.file(name))
    items = [
        _Item(key, key, "0", partial(_member, archive, entry), entry.file_size)
        for entry in archive.infolist()
        if (key := entry.filename.removesuffix(".npy"))
    ]
    if len({item.key for item in items}) != len(items):
        raise CorruptDumpError(f"{name} holds two arrays of one name")
    return items


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> torch.Tensor:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # Python unpacks the others in one piece, however large
        raise ValueError(f"{entry.filename} is packed in a way that NumPy never writes")
    with archive.open(entry) as stream:
        return from_array(np.lib.format.read_array(stream, allow_pickle=False))


def _of_atb(folder: Folder, name: str) -> Iterator[_Item]:
    for number, made in enumerate(atb_bin.objects(folder, name)):
        get = partial(atb_bin.tensor_at, folder, name, made.offset)
        yield _Item(made.offset, _stem(name), str(number), get)


def _safetensors(folder: Folder, name: str) -> list[_Item]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingPackageError(
            f"{name} needs safetensors, which is not installed: pip install safetensors"
        ) from None
    stored = safe_open(folder.file(name), framework="pt")
    names: list[str] = stored.keys()  # type: ignore[no-untyped-call]
    return [_Item(key, key, "0", partial(stored.get_tensor, key)) for key in names]


# -- writing --------------------------------------------------------------------------------------


def write(dump: Dump, folder: Path, written: Written) -> None:
    """Write ``{step}/{path}.{role}.{slot}.npy``, and ``.pt`` for dtypes that NumPy lacks.

    Names of files are written in letters that all file systems have; further calls, passes, ranks
    and generations are named before them.
    """
    names: set[str] = set()
    for record in kept(dump, written, lambda record: None):
        if (values := loaded(record, dump.load, written)) is None:
            continue
        fits = dtype_name(values) in _OF_NUMPY and values.dim() <= _NUMPY_DIMENSIONS
        name = f"{_name(record.site)}{'.npy' if fits else '.pt'}"
        if name.lower() in names:
            name = f"{_name(record.site)}.{record.id}{'.npy' if fits else '.pt'}"
        names.add(name.lower())
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if fits:
            np.save(file, values.numpy(), allow_pickle=False)
        else:
            torch.save(values.clone(), file)
        written.tensors += 1


def _name(site: Site) -> str:
    further = {
        "rank": site.rank, "generation": site.generation, "call": site.call,
        "backward": int(site.phase != "forward"),
    }  # fmt: skip
    before = "".join(f"{what}{number}." for what, number in further.items() if number)
    parts = [file_part(part) for part in (site.path or "root").split("/")]
    last = file_part(f"{before}{parts[-1]}.{site.role}.{site.slot}")
    return "/".join((str(site.step), *parts[:-1], last))
