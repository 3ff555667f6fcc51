"""Single files of tensors under the names of msit's ``components.utils.tool`` and of msprobe.

    from llmdebug_nb.msit import convert_bin_data_to_pt, read_bin_data

    tensor = convert_bin_data_to_pt(read_bin_data("0_Add/after/outtensor0.bin"))

Upstream needs CANN for GE's files; nothing but torch is needed here. Whole dumps: `open_run`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from llmdebug_nb.core.errors import CorruptDumpError, DumpWriteError, NotADumpError, OptionError
from llmdebug_nb.core.kernels.raw import array_of
from llmdebug_nb.store.layouts import atb_bin, ge_file, plain
from llmdebug_nb.store.layouts.files import Folder

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_BYTES = "uint8"


@dataclass(frozen=True)
class TensorBinFile:
    """A ``.bin`` of ATB. ``dtype``: torch's name; ``format``: ``nd``, ``nchw``, ``fractal_nz`` …"""

    path: Path
    dtype: str
    format: str
    dims: tuple[int, ...]

    def get_data(self) -> torch.Tensor:
        """Return the tensor: in its own dtype, int4 as int8, the first one if the file has several.

        Raises:
            CorruptDumpError: the file only describes a tensor, or contradicts itself.
        """
        return atb_bin.tensor_at(Folder(self.path.parent), self.path.name)


@dataclass(frozen=True)
class DumpTensor:
    """An input or output in a GE file. ``data``: its bytes, row-major and little-endian."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class DumpData:
    """A GE file: the inputs and outputs of one call of an operator."""

    op_name: str
    input_data: tuple[DumpTensor, ...]
    output_data: tuple[DumpTensor, ...]


def get_bin_data_from_dir(dump_data_dir: str | os.PathLike[str], max_depth: int = 20) -> list[str]:
    """Return the paths of all ``.bin`` files below a folder, in natural order.

    A link that leads out of the folder is left out, with a warning.

    Raises:
        NotADumpError: it is no folder.
        OptionError: a file lies ``max_depth`` folders deep or deeper.
    """
    path = Path(dump_data_dir)
    if not path.is_dir():
        raise NotADumpError(f"{path} is no folder: name the one that holds the .bin files")
    folder, found = Folder(path), []
    names, left_out = folder.walk()
    for name in (name for name in names if name.endswith(".bin")):
        if name.count("/") >= max_depth:
            raise OptionError(
                f"max_depth {max_depth}: {name} lies {name.count('/')} folders deep; say more"
            )
        try:
            found.append(str(folder.file(name)))
        except CorruptDumpError as error:
            left_out[name] = str(error)
    for why in left_out.values():
        warnings.warn(f"left out: {why}", stacklevel=2)
    return found


def read_bin_data(bin_data_path: str | os.PathLike[str]) -> TensorBinFile:
    """Read the header of a ``.bin`` of ATB; `convert_bin_data_to_pt` reads its values.

    Raises:
        OptionError: the name does not end in .bin.
        CorruptDumpError: it is no such file.
    """
    path = Path(bin_data_path)
    if path.suffix != ".bin":
        raise OptionError(f"{path}: expected the name of a file that ends in .bin")
    folder = _folder_of(path)
    made = next(atb_bin.objects(folder, path.name))
    return TensorBinFile(
        folder.path / path.name, made.summary.dtype, made.format, made.summary.shape
    )


def convert_bin_data_to_pt(bin_tensor: TensorBinFile) -> torch.Tensor:
    """Return the tensor of a ``.bin``. Raises what `TensorBinFile.get_data` raises."""
    return bin_tensor.get_data()


def read_dump_data(dump_data_path: str | os.PathLike[str]) -> DumpData:
    """Read a GE file of torchair.

    Raises:
        CorruptDumpError: it is no such file, or a tensor in it contradicts it.
    """
    path = Path(dump_data_path)
    folder = _folder_of(path)
    call = ge_file.parse(folder, path.name)
    read: dict[str, list[DumpTensor]] = {"input": [], "output": []}
    for part in call.parts:
        tensor = ge_file.load(folder, path.name, part.role, part.index)
        content = ge_file.content_of(tensor)
        read[part.role].append(DumpTensor(content, part.dtype, part.shape, tensor))
    return DumpData(call.name, tuple(read["input"]), tuple(read["output"]))


def convert_bin_data_to_npy(
    bin_dump_data: DumpData, dtype: str = _BYTES
) -> tuple[list[Array], list[Array]]:
    """Return inputs and outputs as flat arrays of a dtype of NumPy, bytes by default, as upstream.

    `parse_torchair_dump_data` returns them in their own dtypes and shapes.

    Raises:
        OptionError: NumPy has no such dtype, or it does not divide the bytes.
    """
    try:
        inputs, outputs = (
            [np.frombuffer(one.data, dtype=dtype) for one in group]
            for group in (bin_dump_data.input_data, bin_dump_data.output_data)
        )
    except (TypeError, ValueError) as error:
        raise OptionError(f"dtype {dtype!r}: {error}") from None
    return inputs, outputs


def parse_torchair_dump_data(
    dump_file: str | os.PathLike[str],
) -> tuple[list[Array], list[Array]]:
    """Return inputs and outputs of a GE file, or of its ``.npz`` with arrays inputs and outputs.

    bfloat16 and float8, which NumPy lacks, become float32.

    Raises:
        CorruptDumpError: it is no such file, or a tensor in it contradicts it.
    """
    path = Path(dump_file)
    if path.suffix == ".npz":
        arrays = plain.arrays(_folder_of(path), path.name)
        inputs, outputs = (list(map(_array, arrays.get(key, ()))) for key in ("inputs", "outputs"))
        return inputs, outputs
    data = read_dump_data(path)
    first, last = (
        [_array(one.tensor) for one in group] for group in (data.input_data, data.output_data)
    )
    return first, last


def save_torch_data(pt_data: object, pt_file_path: str | os.PathLike[str]) -> None:
    """Save a tensor, or what `torch.save` takes, as .pt or .pth; missing folders are made.

    Raises:
        OptionError: another ending. DumpWriteError: it can't be written.
    """
    with _place(pt_file_path, (".pt", ".pth")) as path:
        torch.save(pt_data, path)


def save_npy_data(npy_file_path: str | os.PathLike[str], npy_data: Array | torch.Tensor) -> None:
    """Save an array as .npy; missing folders are made. The path comes first, as upstream has it.

    Raises:
        OptionError: another ending, or an array of objects. DumpWriteError: it can't be written.
    """
    array = _array(npy_data) if isinstance(npy_data, torch.Tensor) else np.asarray(npy_data)
    if array.dtype.hasobject:
        raise OptionError(f"npy_data of {array.dtype}: expected numbers; objects are no tensor")
    with _place(npy_file_path, (".npy",)) as path:
        np.save(path, array, allow_pickle=False)


@contextmanager
def _place(path: str | os.PathLike[str], endings: tuple[str, ...]) -> Iterator[Path]:
    """Check a path to save to, and make its folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(
            f"expected a path, got {type(path).__name__}; it is save_torch_data(data, path),"
            " but save_npy_data(path, data)"
        )
    place = Path(path)
    if place.suffix not in endings:
        raise OptionError(f"{place}: expected a name that ends in {' or '.join(endings)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        yield place
    except (OSError, RuntimeError) as error:  # torch's own error for a full disk
        why = str(error).splitlines()[0][:200]
        raise DumpWriteError(f"can't write {place}: {why}") from None


def _folder_of(path: Path) -> Folder:
    if not path.is_file():
        raise CorruptDumpError(f"{path} is missing, or no regular file")
    return Folder(path.parent)


def _array(tensor: torch.Tensor) -> Array:
    floats = tensor.dtype.is_floating_point and not hasattr(np, str(tensor.dtype)[6:])
    return array_of(tensor.detach().cpu().float() if floats else tensor.detach().cpu())
