"""Dtypes narrower than torch's are decoded as their definitions say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from layout_files import write
from llmdebug_nb.store.layouts import atb_bin, ge_file, narrow

CODES = {name: code for code, name in atb_bin.ACL_DTYPES.items()}


def atb_file(dtype: str, shape: tuple[int, ...], content: bytes) -> bytes:
    return atb_bin.header(dtype, shape, len(content)) + content


def test_hifloat8_has_the_values_of_its_tapered_precision() -> None:
    """Exponents from -15 to 15 with as many bits of mantissa as are left; denormals below them."""
    values = narrow.values("hifloat8").double().tolist()
    positive = {2.0**exponent for exponent in range(-22, -15)}
    for exponent in range(-15, 16):
        bits = 3 if abs(exponent) < 4 else 2 if abs(exponent) < 8 else 1
        positive |= {math.ldexp(1 + part / 2**bits, exponent) for part in range(2**bits)}
    positive ^= {1.5 * 2.0**15}  # its code is that of infinity
    assert values[0x6F] == math.inf
    assert math.isnan(values[0x80])
    finite = [value for value in values if math.isfinite(value)]
    assert len(finite) == 253 == len(set(finite))  # NaN and two infinities are the others
    assert set(finite) == {0.0} | positive | {-value for value in positive}
    assert all(
        values[code] == -values[code + 128] for code in range(1, 128)
    )  # the first bit is the sign


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0b0_0001_000, 1.0), (0b0_0001_111, 1.875), (0b0_001_0_000, 2.0), (0b0_001_1_000, 0.5),
        (0b0_01_00_000, 4.0), (0b0_01_11_111, 0.125 * 1.875), (0b0_10_000_00, 16.0),
        (0b0_11_0111_0, 2.0**15), (0b0_11_1111_0, 2.0**-15), (0b0_0000_001, 2.0**-22),
        (0b1_11_0111_1, -math.inf),
    ],
)  # fmt: skip
def test_hifloat8_by_its_fields(code: int, value: float) -> None:
    """Sign, dot, sign and bits of the exponent, mantissa, each put together by hand."""
    assert narrow.values("hifloat8")[code].item() == value


@pytest.mark.parametrize(
    ("dtype", "theirs", "count"),
    [
        ("float4_e2m1", "float4_e2m1fn", 16), ("float6_e2m3", "float6_e2m3fn", 64),
        ("float6_e3m2", "float6_e3m2fn", 64),
    ],
)  # fmt: skip
def test_small_floats_are_those_of_ml_dtypes(dtype: str, theirs: str, count: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(count, dtype=np.uint8).view(getattr(ml_dtypes, theirs))
    assert narrow.values(dtype)[:count].tolist() == codes.astype(np.float32).tolist()


def test_e1m2_is_quarters() -> None:
    assert narrow.values("float4_e1m2")[:8].tolist() == [part / 4 for part in range(8)]


@given(st.sampled_from(["float4_e2m1", "float4_e1m2", "int4"]), st.lists(st.integers(0, 15)))
def test_two_codes_of_a_byte_are_read_the_low_one_first(dtype: str, codes: list[int]) -> None:
    low, high = codes[::2], codes[1::2]
    content = bytes(a | b << 4 for a, b in itertools.zip_longest(low, high, fillvalue=0))
    assert narrow.fits(dtype, len(codes), len(content))
    decoded = narrow.decoded(content, dtype, (len(codes),))
    assert decoded.tolist() == narrow.values(dtype)[codes].tolist()


@pytest.mark.parametrize("dtype", sorted(narrow.NAMES - {"int4"}))
def test_a_file_of_atb_has_their_values(tmp_path: Path, dtype: str) -> None:
    count = 4 if dtype.startswith("float4") else 2
    file = write(tmp_path / "x.bin", atb_file(dtype, (count,), bytes([0x01, 0x00])))
    (record,) = ld.open_run(file).records()
    assert (record.lost, record.summary.shape) == (None, (count,))
    loaded = ld.open_run(file).load(record)
    assert loaded[0] == narrow.values(dtype)[1]
    assert not loaded[1:].any()


@pytest.mark.parametrize(("dtype", "nbytes"), [("uint1", 1), ("float6_e2m3", 6), ("hifloat8", 9)])
def test_other_ways_to_pack_them_are_listed_without_values(
    tmp_path: Path, dtype: str, nbytes: int
) -> None:
    home = tmp_path / "tensors/0_1/0/0_Add/after"
    write(home / "outtensor0.bin", atb_file(dtype, (8,), bytes(nbytes)))
    write(home / "outtensor1.bin", atb_file("int8", (8,), bytes(8)))
    (lost,) = (r for r in ld.open_run(tmp_path).records() if r.lost)
    assert f"{nbytes} bytes, which make no {dtype} tensor of shape [8]" in lost.lost
    assert (lost.summary.dtype, lost.summary.shape) == (dtype, (8,))


def test_hifloat8_of_ge_has_its_values(tmp_path: Path) -> None:
    content = ge_file.encode("op", [], [(torch.tensor([8, 0x80], dtype=torch.uint8), "")])
    uint8, hifloat8 = (
        ge_file.number_field(1, ge_file.DTYPE_CODES[name]) for name in ("uint8", "hifloat8")
    )
    assert content.count(uint8 + ge_file.number_field(2, 2)) == 1
    content = content.replace(uint8 + ge_file.number_field(2, 2),
                              hifloat8 + ge_file.number_field(2, 2))  # fmt: skip
    run = ld.open_run(write(tmp_path / "Add.op.1.2.3", content))
    (record,) = run.records()
    assert (record.summary.dtype, record.summary.nan) == ("float32", 1)
    assert run.load(record)[0] == 1.0
