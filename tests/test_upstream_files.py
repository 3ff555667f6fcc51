"""Single files under the names of upstream's functions."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import EXAMPLE, X, write
from llmdebug_nb import msit, msprobe, torchair
from test_layout_atb import bin_bytes, bin_header
from test_layout_torchair import ge_bytes


def test_the_example_of_msits_documents_reads_a_bin(tmp_path: Path) -> None:
    file = write(tmp_path / "xx.bin", EXAMPLE)
    read = msit.read_bin_data(str(file))
    assert (read.dtype, read.format, read.dims) == ("float32", "nd", (2, 3))
    assert torch.equal(msit.convert_bin_data_to_pt(read), X)
    with pytest.raises(ValueError, match=r"expected the name of a file that ends in \.bin"):
        msit.read_bin_data(str(tmp_path / "xx.pth"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.int16, torch.bool])
def test_dtypes_that_msits_own_reader_refuses_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    file = write(tmp_path / "x.bin", bin_bytes(X.to(dtype)))
    found = msit.convert_bin_data_to_pt(msit.read_bin_data(file))
    assert found.dtype is dtype
    assert torch.equal(found.float(), X.to(dtype).float())


def test_a_bin_without_values_is_described_and_says_what_is_missing(tmp_path: Path) -> None:
    file = write(tmp_path / "x.bin", bin_header(dtype=27))
    read = msit.read_bin_data(file)
    assert (read.dtype, read.dims) == ("bfloat16", (2, 3))
    with pytest.raises(ld.errors.CorruptDumpError, match=r"x\.bin has no data"):
        read.get_data()
    write(file, EXAMPLE[:-3])
    with pytest.raises(ld.errors.CorruptDumpError, match="21 of 24 bytes are there"):
        msit.read_bin_data(file).get_data()
    with pytest.raises(ld.errors.CorruptDumpError, match="is missing"):
        msit.read_bin_data(tmp_path / "gone.bin")


def test_bin_files_of_a_folder_are_found_in_order_and_none_outside_of_it(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.bin", EXAMPLE)
    base = tmp_path / "dump"
    expected = [write(base / f"0/{n}_Add/x.bin", EXAMPLE) for n in (2, 10)]
    write(base / "0/note.txt", "")
    (base / "out.bin").symlink_to(secret)
    with pytest.warns(UserWarning, match=r"left out: out\.bin is a link that leads out"):
        assert msit.get_bin_data_from_dir(str(base)) == [os.path.realpath(one) for one in expected]
    with pytest.raises(ld.errors.OptionError, match=r"max_depth 2: 0/2_Add/x\.bin lies 2 folders"):
        msit.get_bin_data_from_dir(base, max_depth=2)
    with pytest.raises(ld.errors.NotADumpError, match="is no folder"):
        msit.get_bin_data_from_dir(tmp_path / "gone")


@given(
    inputs=st.lists(st.sampled_from([X, X.half(), X.to(torch.bfloat16), X.int()]), max_size=3),
    outputs=st.lists(st.sampled_from([X, X.double(), X[:0]]), max_size=3),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_inputs_and_outputs_of_ge_files_are_read_as_bytes_and_as_arrays(
    tmp_path: Path, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    file = write(tmp_path / "Add.Add_1.1.2.3", ge_bytes(inputs, outputs))
    data = msit.read_dump_data(str(file))
    raw = msit.convert_bin_data_to_npy(data)
    whole = torchair.parse_torchair_dump_data(str(file))
    for given_, flat, arrays in zip((inputs, outputs), raw, whole, strict=True):
        assert [one.size for one in flat] == [one.nbytes for one in given_]
        assert [one.dtype for one in flat] == [np.dtype("uint8")] * len(given_)
        for tensor, array in zip(given_, arrays, strict=True):
            numpy = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
            assert np.array_equal(array, numpy.numpy())
            assert array.dtype == numpy.numpy().dtype


def test_bytes_of_a_ge_file_are_read_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    data = msprobe.read_dump_data(write(tmp_path / "Add.Add_1.1.2.3", ge_bytes([X], [X * 2])))
    ((first,), (last,)) = msprobe.convert_bin_data_to_npy(data, "float32")
    assert np.array_equal(first, X.flatten().numpy())
    assert np.array_equal(last, X.flatten().numpy() * 2)
    for dtype in ("complex256x", "V7"):
        with pytest.raises(ld.errors.OptionError, match=f"dtype '{dtype}'"):
            msprobe.convert_bin_data_to_npy(data, dtype)
    bad = write(tmp_path / "Add.bad.1.2.3", ge_bytes([X], [X])[:-1])
    with pytest.raises(ld.errors.CorruptDumpError, match="output 0: only 23 of 24 bytes"):
        msprobe.parse_torchair_dump_data(bad)


def test_reduced_files_of_torchair_are_read_without_a_pickle(tmp_path: Path) -> None:
    file = tmp_path / "Add.Add_1.1.2.3_min_max.npz"
    np.savez(file, inputs=[[0.0, 1.0]], outputs=[[2.0, 3.0], [4.0, 5.0]])
    inputs, outputs = torchair.parse_torchair_dump_data(str(file))
    assert [list(one) for one in inputs] == [[0.0, 1.0]]
    assert [list(one) for one in outputs] == [[2.0, 3.0], [4.0, 5.0]]
    np.savez(file, inputs=np.array([object()]), outputs=[])
    with pytest.raises(ld.errors.CorruptDumpError, match=r"min_max\.npz can't be read"):
        torchair.parse_torchair_dump_data(file)


def test_tensors_and_arrays_are_saved_in_upstreams_order_of_arguments(tmp_path: Path) -> None:
    msit.save_torch_data(X, str(tmp_path / "new/x.pth"))
    assert torch.equal(torch.load(tmp_path / "new/x.pth"), X)
    msit.save_npy_data(str(tmp_path / "other/x.npy"), X.numpy())
    msit.save_npy_data(tmp_path / "y.npy", X.to(torch.bfloat16))
    for name in ("other/x.npy", "y.npy"):
        assert np.array_equal(np.load(tmp_path / name), X.numpy())
    assert torch.equal(ld.open_run(tmp_path / "new/x.pth").tensor("x"), X)


@pytest.mark.parametrize(
    ("save", "arguments", "error", "message"),
    [
        (msit.save_torch_data, (X, "x.npy"), ld.errors.OptionError, r"ends in \.pt or \.pth"),
        (msit.save_npy_data, ("x.pt", X), ld.errors.OptionError, r"ends in \.npy"),
        (msit.save_npy_data, (X.numpy(), "x.npy"), ld.errors.OptionError, r"save_npy_data\(path, "),
        (msit.save_npy_data, ("x.npy", [{}]), ld.errors.OptionError, "objects are no tensor"),
        (msit.save_torch_data, (X, "file/x.pt"), ld.errors.DumpWriteError, "can't write file/x.pt"),
    ],
)  # fmt: skip
def test_what_can_not_be_saved_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save, arguments, error, message
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "file", "")
    with pytest.raises(error, match=message) as caught:
        save(*arguments)
    assert "\n" not in str(caught.value)
