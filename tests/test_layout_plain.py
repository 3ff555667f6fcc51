"""Folders of plain tensor files are read."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import llmdebug_nb as ld
from layout_files import EXAMPLE, X, at, check_numbering, paths, read, save, torch_bytes, write
from llmdebug_nb.core.errors import CorruptDumpError, MissingPackageError
from llmdebug_nb.core.kernels.summary import summarize
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import files, plain


class Bomb:
    """Unpickled with code execution on, it leaves a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


# -- plain files --------------------------------------------------------------------------------


def test_plain_folder_names_records_by_file_and_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    np.save(tmp_path / "sub/model.layers.0.npy", X.numpy())
    save(X * 2, tmp_path / "a.pt")
    save({"fc.weight": X * 3, "n": 1, "inner": {"w": X * 4}}, tmp_path / "state.pth")
    save((X * 5, [X * 6]), tmp_path / "several.pt")
    np.savez(tmp_path / "z.npz", q=X.numpy() * 7)
    save_file({"head.weight": X.half()}, tmp_path / "m.safetensors")
    write(tmp_path / "readme.txt", "hi")
    assert layouts.detect(tmp_path) is plain
    contents = read(plain, tmp_path)
    check_numbering(contents)
    scale = {
        ("sub/model.layers.0", "0"): 1,
        ("a", "0"): 2,
        ("fc.weight", "0"): 3,
        ("inner.w", "0"): 4,
        ("several", "0"): 5,
        ("several", "1.0"): 6,
        ("q", "0"): 7,
        ("head.weight", "0"): 1,
    }
    assert len(contents.records) == len(scale)
    for (path, slot), factor in scale.items():
        assert torch.equal(contents.load(at(contents, path, slot=slot)).float(), X * factor), path
    assert at(contents, "head.weight").summary == summarize(X.half())


def test_plain_raw_bytes_beside_tensor_files_are_lost_by_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    write(tmp_path / "raw.bin", "0123")
    contents = read(plain, tmp_path)
    assert at(contents, "raw.bin").lost == (
        "raw.bin has bytes alone: save the tensor as .npy, with its dtype"
    )
    assert torch.equal(contents.load(at(contents, "x")), X)


def test_plain_reads_atbs_bin_beside_other_files(tmp_path: Path) -> None:
    np.save(tmp_path / "golden.npy", X.numpy())
    save(X, tmp_path / "golden.pth")
    write(tmp_path / "mine.bin", EXAMPLE + EXAMPLE)
    write(tmp_path / "cut.bin", EXAMPLE[:-1])
    contents = read(plain, tmp_path)
    for slot in ("0", "1"):
        assert torch.equal(contents.load(at(contents, "mine", slot=slot)), X)
    assert "cut.bin is cut short: 23 of 24 bytes are there" in (at(contents, "cut").lost or "")


def test_plain_needs_safetensors_for_its_own_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert len(read(plain, tmp_path).records) == 1
    save_file({"head.weight": X}, tmp_path / "m.safetensors")
    with pytest.raises(MissingPackageError, match="pip install safetensors"):
        read(plain, tmp_path)


@pytest.mark.parametrize("name", ["x.npy", "x.pt", "x.safetensors"])
def test_plain_single_file_opens(tmp_path: Path, name: str) -> None:
    {
        "x.npy": lambda f: np.save(f, X.numpy()),
        "x.pt": lambda f: torch.save(X, f),
        "x.safetensors": lambda f: save_file({"x": X}, f),
    }[name](tmp_path / name)
    write(tmp_path / "other.pt", b"junk")
    assert layouts.detect(tmp_path / name) is plain
    contents = read(plain, tmp_path / name)
    assert [r.site.path for r in contents.records] == ["x"]
    assert torch.equal(contents.load(contents.records[0]), X)


def test_two_files_are_compared_and_the_answer_has_no_empty_brackets(tmp_path: Path) -> None:
    for name, value in (("golden", X), ("mine", X + 0.1)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", value.numpy())
    report = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    text = str(report)
    assert text.splitlines()[0].endswith("diverged")
    assert "of golden's 1 value " in text
    for said in (text, report.summary()):
        assert "()" not in said


def test_plain_key_in_several_files_is_preceded_by_the_files(tmp_path: Path) -> None:
    save({"logits": X, "loss": X}, tmp_path / "a.pt")
    save({"logits": X * 2}, tmp_path / "b.pt")
    assert sorted(paths(read(plain, tmp_path))) == ["a/logits", "b/logits", "loss"]


def test_plain_files_that_differ_in_their_ending_keep_it(tmp_path: Path) -> None:
    save(X, tmp_path / "x.pt")
    np.save(tmp_path / "x.npy", X.numpy())
    assert paths(read(plain, tmp_path)) == ["x.npy", "x.pt"]


def test_plain_is_detected_only_with_a_tensor_file(tmp_path: Path) -> None:
    write(tmp_path / "deep/er/notes.txt", "x")
    assert layouts.detect(tmp_path) is None
    assert layouts.detect(tmp_path / "absent") is None
    save(X, tmp_path / "deep/er/x.PT")
    assert layouts.detect(tmp_path) is plain


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        X.to(torch.bfloat16),
        X.to(torch.complex64),
        X.t(),
        torch.ones(1).expand(1000),
    ],
)
def test_plain_torch_tensors_of_any_kind_come_back(tmp_path: Path, tensor: torch.Tensor) -> None:
    save(tensor, tmp_path / "x.pt")
    contents = read(plain, tmp_path)
    assert torch.equal(contents.load(contents.records[0]), tensor)
    assert contents.records[0].summary == summarize(tensor)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3, dtype=">i4"),
        np.asfortranarray(X.numpy()),
        np.float64(3),
        np.zeros((0, 2)),
    ],
)
def test_plain_numpy_arrays_of_any_order_come_back(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    contents = read(plain, tmp_path)
    assert np.array_equal(contents.load(contents.records[0]).numpy(), array)


def hostile_npy(shape: str, dtype: str = "<f4", data: bytes = b"1234") -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data


def hostile_zip(name: str, size: int) -> bytes:
    """A compressed archive whose member unfolds to ``size`` bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(size))
    return out.getvalue()


def object_array() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([{}], dtype=object), allow_pickle=True)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bad.pt", b""),
        ("bad.pt", b"junk"),
        ("bad.pt", torch_bytes(X)[:-30]),
        ("bad.pt", torch_bytes(X)[:200]),
        ("bad.pt", torch_bytes(X, _use_new_zipfile_serialization=False)[:-5]),
        ("bad.pt", torch_bytes({"a": 1})),
        ("bad.pt", hostile_zip("a/data.pkl", 1 << 20)),
        ("bad.pt", torch_bytes(torch.ones(1).expand(1 << 20, 1 << 20))),
        ("bad.pth", pickle.dumps([1, 2])),
        ("bad.npy", b""),
        ("bad.npy", hostile_npy("(2, 3)")),
        ("bad.npy", hostile_npy(f"({1 << 60},)")),
        ("bad.npy", hostile_npy("(-1,)")),
        ("bad.npy", hostile_npy("(1,)", "<U1")),
        ("bad.npy", object_array()),
        ("bad.npz", b"PK\x03\x04junk"),
        ("bad.npz", hostile_zip("readme", 10)),
        ("bad.safetensors", b""),
        ("bad.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
        (
            "bad.safetensors",
            struct.pack("<Q", 64)
            + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(64),
        ),
    ],
)
def test_plain_damaged_file_is_lost_by_name_and_hides_no_other(
    tmp_path: Path, name: str, data: bytes
) -> None:
    write(tmp_path / name, data)
    save(X, tmp_path / "good.pt")
    contents = read(plain, tmp_path)
    assert at(contents, "good").lost is None
    (lost,) = [record for record in contents.records if record.lost]
    assert name in (lost.lost or "")
    with pytest.raises(CorruptDumpError, match=name):
        read(plain, tmp_path / name)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["x.pt", "cpu_1/0/root.fc/output.pth"])
def test_pickled_code_is_never_run(tmp_path: Path, where: str, legacy: bool) -> None:
    target = tmp_path / "executed"
    folder = tmp_path / "dump"
    write(folder / where, torch_bytes(Bomb(target), _use_new_zipfile_serialization=not legacy))
    save(X, folder / Path(where).parent / ("good.pt" if where == "x.pt" else "input_0.pth"))
    layout = layouts.detect(folder)
    assert layout is not None
    (lost,) = [record.lost for record in read(layout, folder).records if record.lost]
    assert not target.exists()
    assert "no pickled code is run" in lost
    assert "system" in lost


def test_plain_container_that_holds_itself_is_refused(tmp_path: Path) -> None:
    ring: list[Any] = []
    ring.append(ring)
    save(ring, tmp_path / "ring.pt")
    with pytest.raises(CorruptDumpError, match="nests more than 200 objects"):
        read(plain, tmp_path)


def test_plain_archive_that_unfolds_out_of_proportion_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "_EXPANSION", 1 << 16)
    write(tmp_path / "x.npz", hostile_zip("x.npy", 1 << 20))
    with pytest.raises(CorruptDumpError, match="claims 1,048,576 bytes"):
        read(plain, tmp_path)
