"""Files of other tools that claim more than they hold: they take no more time or memory for it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import X, save, write
from llmdebug_nb.core import paths
from llmdebug_nb.core.constants import MOST_DIMENSIONS
from llmdebug_nb.core.errors import CorruptDumpError, LLMDebugError
from llmdebug_nb.store.layouts import drafts, files, pickled

LEAF = {
    "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1, "Min": 0, "Mean": 0.5,
    "Norm": 1,
}  # fmt: skip

COUNT = 20


def archive(data: bytes, **records: bytes) -> bytes:
    """Return a file of `torch.save` with this pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr("a/data.pkl", data)
        packed.writestr("a/version", "3\n")
        for key, value in records.items():
            packed.writestr(f"a/data/{key}", value)
    return out.getvalue()


def tuples(depth: int) -> bytes:
    """Return the instructions for a tuple that holds one twice, that holds one twice, ..."""
    return b")" + b"".join(b"q%bh%b\x86" % (bytes([n]), bytes([n])) for n in range(depth))


def nested(depth: int) -> Any:
    value: Any = X
    for _ in range(depth):
        value = [value]
    return value


def ring() -> Any:
    value: list[Any] = []
    value += [value, X]
    return value


def laughs() -> Any:
    value: Any = [X] * 10
    for _ in range(12):
        value = [value] * 10
    return value


def repeated(count: int) -> bytes:
    """Return an archive that names one packed array of 64 MiB so often."""
    content = io.BytesIO()
    np.save(content, np.zeros(1 << 26, np.uint8))
    data = content.getvalue()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed, crc = packer.compress(data) + packer.flush(), zlib.crc32(data)
    head = struct.pack("<HHHHHIII", 20, 0, 8, 0, 0, crc, len(packed), len(data))
    out = b"PK\3\4" + head + struct.pack("<HH", 6, 0) + b"00.npy" + packed
    places = b"".join(
        b"PK\1\2\x14\0" + head + struct.pack("<HHHHHII", 6, 0, 0, 0, 0, 0, 0) + b"%02d.npy" % n
        for n in range(count)
    )
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(places), len(out), 0)
    return out + places + b"PK\5\6" + end


def bzipped() -> bytes:
    content, out = io.BytesIO(), io.BytesIO()
    np.save(content, np.zeros(1 << 26, np.uint8))
    with zipfile.ZipFile(out, "w", zipfile.ZIP_BZIP2) as packed:
        packed.writestr("x.npy", content.getvalue())
    return out.getvalue().replace(struct.pack("<I", len(content.getvalue())), b"\0\1\0\0")


def of_nothing() -> bytes:
    out = io.BytesIO()
    header = {"descr": "|V0", "fortran_order": False, "shape": (1 << 60,)}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "ring": ("a.pt", lambda: saved(ring()), "in one another"),
    "deep": ("a.pt", lambda: saved(nested(240)), "in one another"),
    "laughs": ("a.pt", lambda: saved(laughs()), "nests more than|repeats its tensors"),
    "hash": ("a.pt", lambda: archive(b"\x80\2}" + tuples(60) + b"K\1s."), "far more work"),
    "sets": (
        "a.pt",
        lambda: archive(b"\x80\2c__builtin__\nset\n(" + tuples(60) + b"l\x85R."),
        "far more work",
    ),
    "calls": (
        "a.pt",
        lambda: archive(
            b"\x80\2c_codecs\nencode\nq\0X" + struct.pack("<I", 100_000) + b"x" * 100_000
            + b"q\1" + b"h\0h\1\x85R0" * 20_000 + b"N."
        ),
        "far more work",
    ),
    "references": ("a.pt", lambda: saved([torch.ones(1 << 18)] * 20_000), "more often|at most"),
    "expanded": ("a.pt", lambda: saved(torch.ones(1).expand(1 << 28)), "at most"),
    "dimensions": ("a.pt", lambda: saved(torch.ones([1] * 20_000)), "dimensions"),
    "prefix": ("a.pt", lambda: b"PK\3\4" + b"\0" * 60 + saved(X), "bytes before its files|missing"),
    "tar": ("a.pt", lambda: tar(), "is a tar file"),
    "bzip2": ("a.npz", bzipped, "packed in a way"),
    "void": ("a.npy", of_nothing, "no numbers"),
}  # fmt: skip


def tar() -> bytes:
    """Return a tar file that begins as a pickle of `torch.save` does."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        packed.addfile(tarfile.TarInfo(pickle.dumps(1, 2).decode("latin-1") + "storages"))
    return out.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_claims_more_than_it_holds_is_lost_at_once(tmp_path: Path, name: str) -> None:
    file, make, why = HOSTILE[name]
    write(tmp_path / file, make())
    save(X, tmp_path / "good.pt")
    start = time.process_time()
    found = list(ld.open_run(tmp_path).records())
    assert time.process_time() - start < 5  # on a busy machine; each takes less than one
    reasons = [record.lost for record in found if record.lost]
    assert reasons
    assert any(re.search(why, reason) for reason in reasons), reasons[:3]
    assert any(record.summary.shape == tuple(X.shape) for record in found if not record.lost)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: write(folder / "a.npz", repeated(COUNT)),
        lambda folder: save([torch.ones(1).expand(1 << 24) for _ in range(COUNT)], folder / "a.pt"),
        lambda folder: [
            save(torch.ones(1).expand(1 << 24), folder / f"{n}.pt") for n in range(COUNT)
        ],
    ],
)  # fmt: skip
def test_what_small_files_unpack_to_is_limited_for_all_of_them_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    make(tmp_path)
    summed = [0]
    of = drafts.summarize

    def counting(tensor: torch.Tensor) -> object:
        summed[0] += tensor.numel() * tensor.itemsize
        return of(tensor)

    monkeypatch.setattr(drafts, "summarize", counting)
    found = list(ld.open_run(tmp_path).records())
    assert len(found) == COUNT
    assert 0 < summed[0] <= files._EXPANSION + files._TIMES * 100_000
    assert sum(record.lost is not None for record in found) >= COUNT // 2


def test_a_tensor_that_was_read_once_can_be_read_again(tmp_path: Path) -> None:
    save([torch.ones(1).expand(1 << 24)] * 3, tmp_path / "a.pt")
    run = ld.open_run(tmp_path)
    kept = [record for record in run.records() if record.payload is not None]
    assert len(kept) >= 1
    for _ in range(3):
        for record in kept:
            assert run.load(record).numel() == 1 << 24


def test_packed_zeros_and_views_of_real_dumps_are_read(tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 64, 64).tril().expand(2, 32, 64, 64)
    save({"mask": mask, "tied": X, "again": X}, tmp_path / "a.pt")
    np.savez_compressed(tmp_path / "z.npz", padded=np.zeros((512, 1024), np.float32))
    run = ld.open_run(tmp_path)
    assert not [record.lost for record in run.records() if record.lost]
    torch.testing.assert_close(run.tensor("mask"), mask)
    assert run.tensor("padded").shape == (512, 1024)


def test_what_a_pickle_hangs_on_a_tensor_changes_nothing(tmp_path: Path) -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    tensor.detach = "x"  # type: ignore[method-assign, assignment]
    tensor.numel = 5  # type: ignore[method-assign, assignment]
    save(tensor, tmp_path / "a.pt")
    found = list(ld.open_run(tmp_path).records())
    assert [record.summary.shape for record in found] == [(3,)]


def test_tensors_without_values_are_told_by_dtype_and_shape(tmp_path: Path) -> None:
    save(
        {"m": torch.empty(1 << 30, 1 << 30, device="meta"), "s": torch.eye(3).to_sparse()},
        tmp_path / "a.pt",
    )
    run = ld.open_run(tmp_path)
    lost = {record.site.path: record for record in run.records()}
    assert "meta" in str(lost["m"].lost)
    assert "sparse" in str(lost["s"].lost)
    assert lost["s"].summary.shape == (3, 3)
    assert str(ld.compare(run, run, progress=False))


def probe(folder: Path, data: dict[str, Any], construct: dict[str, str] | None = None) -> Path:
    write(folder / "dump.json", json.dumps({"task": "statistics", "data": data}).encode())
    if construct is not None:
        write(folder / "construct.json", json.dumps(construct).encode())
    return folder


def test_a_name_of_20_000_parts_is_shortened_and_its_neighbours_are_read(tmp_path: Path) -> None:
    deep = "a." * 20_000 + "b"
    probe(
        tmp_path,
        {
            f"Module.{deep}.Linear.forward.0": {"output": [LEAF]},
            "Module.c.Linear.forward.0": {"output": [LEAF]},
            f"Module.{'9' * 5000}.Linear.forward.0": {"output": [LEAF]},
        },
    )
    tracemalloc.start()
    run = ld.open_run(tmp_path)
    found = [record.site.path for record in run.records()]
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert paths.bounded(deep) in found
    assert "c" in found
    assert len(run.nodes) < 300
    assert str(ld.topology(run))


@pytest.mark.parametrize("shape", [[1] * 100_000, [1 << 62] * 9, ",".join(["1"] * 100_000)])
def test_a_shape_that_no_tensor_has_hides_no_other_record(tmp_path: Path, shape: Any) -> None:
    probe(tmp_path, {"Module.a.Linear.forward.0": {"output": [{**LEAF, "shape": shape}, LEAF]}})
    first, second = ld.open_run(tmp_path).records()
    assert "is not a shape" in str(first.lost)
    assert second.lost is None


def test_a_long_chain_of_calls_in_calls_is_walked_once(tmp_path: Path) -> None:
    count = 20_000
    chain = {f"Tensor.add.{n}.forward": f"Tensor.add.{n + 1}.forward" for n in range(count)}
    last = {f"Tensor.add.{count}.forward": "Module.top.Linear.forward.0"}
    probe(tmp_path, {f"Tensor.add.{n}.forward": {"output": [LEAF]} for n in range(9)}, chain | last)
    start = time.process_time()
    found = {record.site.path for record in ld.open_run(tmp_path).records()}
    assert found == {"top/Tensor.add"} or found == {"top/add"}, found
    assert time.process_time() - start < 5


@given(st.text(max_size=3000), st.integers(0, 600), st.text(max_size=700))
def test_a_bounded_path_fits_every_reader_and_differs_where_the_path_does(
    name: str, depth: int, operator: str
) -> None:
    path = f"{'a.' * depth}{name}/{operator}"
    short = paths.bounded(path)
    assert len(short) <= paths.LONGEST
    assert paths.module_of(short).count(".") <= paths.DEEPEST
    assert paths.bounded(short) == short
    assert paths.module_of(short) == paths.bounded(paths.module_of(path))
    other = paths.bounded(path.replace("/", "x/", 1))
    assert other != short


@given(st.recursive(
    st.integers() | st.text() | st.none() | st.floats() | st.binary(max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner)
    | st.tuples(inner, inner) | st.sets(st.integers()),
))  # fmt: skip
def test_no_object_that_a_program_saves_asks_for_too_much(value: Any) -> None:
    for protocol in (2, 4):
        data = io.BytesIO(pickle.dumps({"x": value}, protocol))
        pickled._check_pickle("a.pt", data)
        assert data.read() == b""


@given(st.binary(max_size=200))
def test_instructions_of_nonsense_are_our_error(data: bytes) -> None:
    with contextlib.suppress(LLMDebugError), files.reading("a.pt"):
        pickled._check_pickle("a.pt", io.BytesIO(b"\x80\2" + data))


def test_dimensions_within_the_limit_are_read(tmp_path: Path) -> None:
    save(torch.ones([1] * MOST_DIMENSIONS), tmp_path / "a.pt")
    (record,) = ld.open_run(tmp_path).records()
    assert record.lost is None
    save(torch.ones([1] * (MOST_DIMENSIONS + 1)), tmp_path / "a.pt")
    with pytest.raises(CorruptDumpError, match="dimensions"):
        len(ld.open_run(tmp_path))
