"""An ONNX file opens as a dump of its tensors; two single files of any kind are compared."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

import llmdebug_nb as ld
from layout_files import X, at, read, save, write
from llmdebug_nb.cli import main
from llmdebug_nb.core.errors import CorruptDumpError
from llmdebug_nb.store import layouts
from llmdebug_nb.store.layouts import atb_bin, ge_file, plain

KINDS = [
    "FLOAT", "DOUBLE", "FLOAT16", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "BOOL",
]  # fmt: skip


def model(
    file: Path, tensors: list[TensorProto], nodes: list[onnx.NodeProto] | None = None
) -> Path:
    """Write a model with these initializers."""
    graph = helper.make_graph(nodes or [], "net", [], [], initializer=tensors)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(helper.make_model(graph).SerializeToString())
    return file


def external(name: str, data: dict[str, str], dims: tuple[int, ...] = (2, 3)) -> TensorProto:
    """Return an initializer whose data lies elsewhere."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in data.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


@pytest.mark.parametrize("raw", [True, False])
def test_an_onnx_file_opens_as_its_initializers(tmp_path: Path, raw: bool) -> None:
    arrays = {
        kind: np.arange(6)
        .reshape(2, 3)
        .astype(helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind)))
        for kind in KINDS
    }
    made = [
        numpy_helper.from_array(array, kind)
        if raw
        else helper.make_tensor(
            kind, TensorProto.DataType.Value(kind), array.shape, array.flatten()
        )
        for kind, array in arrays.items()
    ]
    made.append(helper.make_tensor("half", TensorProto.BFLOAT16, [2], [1.5, -2.0]))
    made.append(helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5]))
    made.append(helper.make_tensor("none", TensorProto.FLOAT, [0, 3], []))
    file = model(tmp_path / "net.onnx", made)
    assert layouts.detect(file) is plain
    contents = read(plain, file)
    assert not [record.lost for record in contents.records if record.lost]
    for kind, array in arrays.items():
        loaded = contents.load(at(contents, kind))
        assert (loaded.numpy().dtype, loaded.tolist()) == (array.dtype, array.tolist())
    half = contents.load(at(contents, "half"))
    assert (half.dtype, half.tolist()) == (torch.bfloat16, [1.5, -2.0])
    assert contents.load(at(contents, "scale")).shape == ()
    assert contents.load(at(contents, "none")).shape == (0, 3)


def test_constants_and_the_graphs_inside_have_their_tensors(tmp_path: Path) -> None:
    value = numpy_helper.from_array(X.numpy(), "value")
    inner = helper.make_graph([], "then", [], [], [numpy_helper.from_array(X.numpy() + 1, "inner")])
    nodes = [
        helper.make_node("Constant", [], ["made"], value=value),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    contents = read(plain, model(tmp_path / "net.onnx", [], nodes))
    assert torch.equal(contents.load(at(contents, "made")), X)
    assert [r.site.path for r in contents.records] == ["made", "inner", "inner"]
    assert torch.equal(contents.load(contents.records[2]), X + 1)


def test_narrow_numbers_are_read_wider_and_what_can_not_be_read_says_why(tmp_path: Path) -> None:
    made = [
        helper.make_tensor("four", TensorProto.INT4, [3], [-8, 7, 1]),
        helper.make_tensor("text", TensorProto.STRING, [1], [b"secret"]),
        TensorProto(name="short", data_type=TensorProto.FLOAT, dims=(1 << 40,), raw_data=bytes(8)),
        TensorProto(name="odd", data_type=77, dims=(1,), raw_data=bytes(8)),
    ]
    contents = read(plain, model(tmp_path / "net.onnx", made))
    four = contents.load(at(contents, "four"))
    assert (four.dtype, four.tolist()) == (torch.int8, [-8, 7, 1])
    lost = {r.site.path: r.lost or "" for r in contents.records}
    assert "dtype string, which can't be read" in lost["text"]
    assert "has 8 bytes, which make no float32 tensor" in lost["short"]
    assert lost["odd"]


def test_data_outside_is_read_from_the_models_folder_alone(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.bin", bytes(24))
    home = tmp_path / "home"
    write(home / "data.bin", b"ab" + X.numpy().tobytes())
    (home / "link.bin").parent.mkdir(exist_ok=True)
    (home / "link.bin").symlink_to(secret)
    places = {
        "good": {"location": "data.bin", "offset": "2", "length": "24"},
        "rest": {"location": "data.bin", "offset": "2"},
        "up": {"location": "../secret.bin", "length": "24"},
        "absolute": {"location": str(secret), "length": "24"},
        "link": {"location": "link.bin", "length": "24"},
        "none": {"length": "24"},
        "beyond": {"location": "data.bin", "offset": "2", "length": "25"},
        "negative": {"location": "data.bin", "offset": "-2", "length": "24"},
        "long": {"location": "data.bin", "offset": "9" * 40},
        "other": {"location": "data.bin", "length": "20"},
    }
    made = [external(name, place) for name, place in places.items()]
    contents = read(plain, model(home / "net.onnx", made))
    found = {r.site.path: r for r in contents.records}
    for name in ("good", "rest"):
        assert torch.equal(contents.load(found[name]), X)
    assert {name for name, record in found.items() if record.lost} == places.keys() - {
        "good",
        "rest",
    }


@pytest.mark.parametrize("content", [b"", b"\x08", b"no model", bytes(99)])
def test_a_file_that_is_no_model_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CorruptDumpError, match=r"net\.onnx"):
        ld.open_run(write(tmp_path / "net.onnx", content))


# -- two single files ---------------------------------------------------------------------------


def _npy(file: Path, tensor: torch.Tensor) -> None:
    np.save(file, tensor.numpy())


def _npz(file: Path, tensor: torch.Tensor) -> None:
    np.savez(file, inner=tensor.numpy())


FILES: dict[str, Callable[[Path, torch.Tensor], object]] = {
    "a.npy": _npy,
    "b.npz": _npz,
    "c.pt": lambda file, tensor: save(tensor, file),
    "d.pth": lambda file, tensor: save({"x": tensor}, file),
    "e.safetensors": lambda file, tensor: save_file({"weight": tensor}, file),
    "f.onnx": lambda file, tensor: model(file, [numpy_helper.from_array(tensor.numpy(), "w")]),
    "0_Add/before/intensor3.bin": lambda file, tensor: write(file, atb_bin.encode(tensor)),
    "h.bin": lambda file, tensor: write(file, atb_bin.encode(tensor)),
    "Add.op.1.2.3": lambda file, tensor: write(file, ge_file.encode("op", [], [(tensor, "")])),
}


@pytest.mark.parametrize(
    ("golden", "mine"),
    [
        *((golden, "a.npy") for golden in FILES),
        *(("h.bin", mine) for mine in FILES),
        ("0_Add/before/intensor3.bin", "0_Add/before/intensor3.bin"),
    ],
)
def test_two_files_of_one_tensor_are_compared_whatever_they_are_named(
    tmp_path: Path, golden: str, mine: str
) -> None:
    for folder, factor in (("golden", 1.0), ("same", 1.0), ("moved", 1.5)):
        for name in (golden, mine):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            FILES[name](tmp_path / folder / name, X * factor + 1)
    same = ld.compare(tmp_path / "golden" / golden, tmp_path / "same" / mine, progress=False)
    (difference,) = same.differences
    assert (same.verdict, difference.verdict) == ("match", "match")
    moved = ld.compare(tmp_path / "golden" / golden, tmp_path / "moved" / mine, progress=False)
    (difference,) = moved.differences
    assert (moved.verdict, difference.verdict) == ("diverged", "diverged")
    assert difference.pair.golden.site == difference.pair.mine.site


def test_the_command_compares_two_files(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    _npy(Path("a.npy"), X)
    write(Path("b.bin"), atb_bin.encode(X))
    assert main(["compare", "a.npy", "b.bin"]) == 0
    assert "a.npy against b.bin: match" in capsys.readouterr().out
    write(Path("b.bin"), atb_bin.encode(X * 3))
    assert main(["compare", "a.npy", "b.bin"]) == 1


def test_files_of_several_tensors_are_compared_by_their_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=X.numpy(), b=X.numpy() * 2)
    made = [numpy_helper.from_array(X.numpy() * f, name) for name, f in (("b", 2), ("w", 1))]
    model(tmp_path / "b.onnx", made)
    report = ld.compare(tmp_path / "a.npz", tmp_path / "b.onnx", progress=False)
    assert (report.verdict, len(report.differences)) == ("match", 2)


def test_a_ge_file_that_is_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = write(tmp_path / "Add.op.1.2.3", struct.pack("<Q", 99) + b"x")
    with pytest.raises(CorruptDumpError, match=r"Add\.op\.1\.2\.3"):
        ld.open_run(file)


def test_folders_of_plain_files_are_compared_by_their_names(tmp_path: Path) -> None:
    for folder, factor in (("golden", 1), ("mine", 1.5)):
        (tmp_path / folder / "deep").mkdir(parents=True)
        np.save(tmp_path / folder / "deep/a.npy", X.numpy() + 1)
        save((X + 1) * factor, tmp_path / folder / "b.pt")
    report = ld.compare(tmp_path / "golden", tmp_path / "mine", progress=False)
    assert report.verdict == "diverged"
    assert {d.site.path: d.verdict for d in report.differences} == {
        "deep/a": "match", "b": "diverged",
    }  # fmt: skip
