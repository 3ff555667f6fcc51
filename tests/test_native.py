"""The C kernel compared with the torch path and with NumPy in float64; and raw tensor bytes."""

from __future__ import annotations

import importlib.util
import math
import platform
import shutil
import subprocess
import sysconfig
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from llmdebug_nb.capture.tape import native as tape
from llmdebug_nb.core.dtypes import DTYPE_NAMES
from llmdebug_nb.core.kernels import native, raw
from llmdebug_nb.core.kernels.summary import figures, torch_figures

needs_kernel = pytest.mark.skipif(native.kernel() is None, reason=str(native.why_not()))

DTYPES = {DTYPE_NAMES[dtype]: dtype for dtype in native.KINDS}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# special values as bits without the sign: 0, subnormals, 1, the largest, infinity, NaNs
SPECIAL = {
    "float32": (
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x3F800000,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
    ),
    "float64": (
        0,
        1,
        (1 << 52) - 1,
        1 << 52,
        1023 << 52,
        (2047 << 52) - 1,
        2047 << 52,
        (2047 << 52) + 1,
        4095 << 51,
    ),
    "float16": (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00),
    "bfloat16": (0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0),
}
SIZES = st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 1023, 1024, 1025]), st.integers(0, 300))


@pytest.fixture
def afresh(monkeypatch):
    """Load the library anew in the test, and again after it."""
    monkeypatch.delenv("LLMDEBUG_NATIVE", raising=False)

    def forget():
        native._load.cache_clear()
        native.kernel.cache_clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


@st.composite
def bit_patterns(draw, name):
    """Return ``uint[n]`` of the dtype's width: any bits, many of them special."""
    width = 8 * DTYPES[name].itemsize
    if name == "bool":
        elements = st.integers(0, 1)
    else:
        sign = 1 << (width - 1)
        special = SPECIAL.get(name, (0, 1, sign - 1))
        elements = st.sampled_from([*special, *(bits | sign for bits in special)]) | st.integers(
            0, (1 << width) - 1
        )
        if draw(st.booleans()):  # without NaN, which would hide what else is wrong
            elements = elements.filter(
                lambda bits: bits & (sign - 1) <= special[-3] or name not in SPECIAL
            )
    return draw(hnp.arrays(f"uint{width}", draw(SIZES), elements=elements))


def values_of(bits: np.ndarray, name: str) -> np.ndarray:
    """Return the numbers that the bits of a dtype mean, in float64."""
    with np.errstate(invalid="ignore"):  # NaN
        if name == "bfloat16":
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view(name).astype(np.float64)


def by_numpy(values: np.ndarray) -> tuple:
    """Return the seven figures of ``float64[n]``."""
    nan, inf, zero = (
        int(np.count_nonzero(x)) for x in (np.isnan(values), np.isinf(values), values == 0)
    )
    if not len(values):
        return (None,) * 7
    if nan:
        return (*[math.nan] * 4, nan, inf, zero)
    with np.errstate(all="ignore"):
        mean, norm = float(values.sum() / len(values)), math.sqrt((values * values).sum())
    return float(values.min()), float(values.max()), mean, norm, nan, inf, zero


def agree(got: tuple, expected: tuple, values: np.ndarray) -> bool:
    """Return True if extremes and counts are equal, and sums up to their order of addition."""
    if expected[0] is None:
        return got == expected
    with np.errstate(all="ignore"):
        magnitude = float(np.abs(values[np.isfinite(values)]).sum()) / len(values)
    same = [a == b or (a != a and b != b) for a, b in zip(got, expected, strict=True)]
    same[2] |= abs(got[2] - expected[2]) <= 1e-12 * magnitude or not math.isfinite(magnitude)
    same[3] |= (
        abs(got[3] - expected[3]) <= 1e-12 * expected[3] + 1e-159
    )  # squares below leave float64's normal range
    negative_zero = any(x == 0 and math.copysign(1, x) < 0 for x in got[:2])
    types = [type(x) for x in got] == [float] * 4 + [int] * 3
    return all(same) and not negative_zero and types


def kernel_figures(bits: np.ndarray, name: str, offset: int = 0) -> tuple:
    """Call the C kernel on bits that start ``offset`` bytes after an aligned address."""
    room = np.empty(bits.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + offset % 64
    room[begin : begin + bits.nbytes] = bits.view(np.uint8)
    return native.kernel()(room.ctypes.data + begin, bits.nbytes, native.KINDS[DTYPES[name]])


@needs_kernel
@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), offset=st.integers(0, 63))
def test_the_kernel_the_torch_path_and_numpy_agree(name, data, offset):
    bits = data.draw(bit_patterns(name))
    values = values_of(bits, name)
    expected = by_numpy(values)
    tensor = raw.from_bytes(bits.tobytes(), name, bits.shape)
    assert agree(torch_figures(tensor), expected, values)
    assert agree(figures(tensor), expected, values)
    if len(bits):
        assert agree(kernel_figures(bits, name, offset), expected, values)
        assert agree(figures(tensor), torch_figures(tensor), values)


@needs_kernel
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_they_agree_on_large_tensors(name, finite):
    random = np.random.default_rng(0)
    for size in (1 << 14, (1 << 14) + 1, 300_007):
        width = 8 * DTYPES[name].itemsize
        bits = random.integers(0, 2 if name == "bool" else 1 << width, size, f"uint{width}")
        values = values_of(bits, name)
        if name == "float64":  # whose own sums leave float64's range otherwise
            bits = (random.standard_normal(size) * 10.0 ** random.integers(-20, 20, size)).view(
                np.uint64
            )
            values = values_of(bits, name)
        if finite:
            bits[~np.isfinite(values)] = 0
        else:
            bits[np.isnan(values)] = SPECIAL[name][6] if name in SPECIAL else 0
        values = values_of(bits, name)
        tensor = raw.from_bytes(bits.tobytes(), name, bits.shape)
        expected = by_numpy(values)
        assert agree(kernel_figures(bits, name, 1), expected, values)
        assert agree(torch_figures(tensor), expected, values)


def compiled_for(level: str, folder: Path) -> Path:
    """Compile the kernels of one level of x86-64, whatever this processor's is."""
    source = folder / "level.c"
    source.write_text(
        f"#define llmdebug_figures unused\n#include "
        f'"{native.LIBRARY.with_name("summary.c")}"\n#undef llmdebug_figures\n'
        f"EXPORT int llmdebug_figures(Call *call) {{ return summarize_by(kernels_{level}, "
        "call->kind, (const unsigned char *)(uintptr_t)call->address, call->nbytes, "
        "call->threads, &call->summary); }\n",
        encoding="utf-8",
    )
    flags = [
        "-std=c11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fopenmp-simd",
        "-fPIC",
        "-shared",
        "-lm",
        "-pthread",
    ]
    subprocess.run(["cc", str(source), "-o", str(folder / "level.so"), *flags], check=True)
    return folder / "level.so"


@pytest.mark.skipif(
    not shutil.which("cc") or platform.machine() != "x86_64", reason="needs cc on x86-64"
)
@pytest.mark.parametrize("level", ["any", "avx2"])
def test_processors_with_narrower_vectors_get_the_same_figures(
    level, tmp_path, monkeypatch, afresh
):
    if level == "avx2" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(native, "LIBRARY", compiled_for(level, tmp_path))
    assert native.why_not() is None
    for finite in (True, False):
        for name in DTYPES:
            test_they_agree_on_large_tensors(name, finite)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0)[5:],
        torch.arange(12.0).reshape(12, 1)[:, :1].as_strided((12, 1), (1, 99)),
        torch.imag(torch.tensor([1 + 2j, -3j]).conj()),
        torch._neg_view(torch.arange(4.0)),
        torch.tensor([1 + 2j, -3j]).conj(),
        torch.nn.Parameter(torch.arange(4.0)),
        torch.arange(4.0, requires_grad=True) * 2,
        torch.tensor(7.0),
        torch.empty(0, 3),
        torch.frombuffer(bytearray(range(17)), dtype=torch.int32, offset=1, count=4),
        torch.arange(4.0).as_subclass(type("Mine", (torch.Tensor,), {})),
    ],
    ids=lambda t: f"{tuple(t.shape)}{t.stride()}{t.dtype}",
)
def test_figures_and_bytes_do_not_depend_on_alignment_or_strides(tensor):
    whole = raw.plain(tensor).clone()
    assert raw.to_bytes(tensor).tobytes() == whole.flatten().view(torch.uint8).numpy().tobytes()
    assert figures(tensor) == figures(whole)


def _strided(dtype):
    """Return tensors of a dtype whose elements lie in every other order than row-major."""
    most = 2 if dtype is torch.bool else 256
    size = 4 * dtype.itemsize
    base = torch.randint(most, (6, 8, size), dtype=torch.uint8).view(dtype)
    return base.transpose(0, 1), base.permute(2, 1, 0), base[:, ::2], base[0].t(), base[0, 0, ::3]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", DTYPES_BY_NAME)
def test_bytes_of_strided_tensors_are_those_of_their_copies(name, inference):
    with torch.inference_mode(inference):
        for tensor in _strided(DTYPES_BY_NAME[name]):
            assert not tensor.is_contiguous()
            whole = tensor.clone(memory_format=torch.contiguous_format)
            made = raw.plain(tensor)
            assert (made.shape, made.dtype) == (whole.shape, whole.dtype)
            expected = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
            assert raw.to_bytes(tensor).tobytes() == expected.tobytes()


class _Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


def test_torch_with_its_threads_copies_no_strided_tensor():
    copies = {"clone", "copy_", "contiguous", "empty_like"}
    tensor = torch.ones(512, 512)[:, ::2]
    with _Called() as called:
        tensor.contiguous()
    assert called.names & copies
    with _Called() as called:
        raw.plain(tensor)
    assert called.names
    assert not called.names & copies


def test_bytes_share_memory_with_the_tensor_and_keep_it_alive():
    tensor = torch.zeros(1000)
    data = raw.to_bytes(tensor)
    tensor[1] = 1
    assert data.view(np.float32)[1] == 1
    assert data.data.nbytes == data.nbytes == 4000
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is not None
    del data
    assert alive() is None


@pytest.mark.parametrize("start", [0, 10])
def test_a_tensor_whose_storage_was_freed_or_cut_is_not_read(start):
    for left in (0, 100):
        tensor = torch.ones(100)[start:]
        tensor.untyped_storage().resize_(left)
        assert raw.memory(tensor) is None
        with pytest.raises(RuntimeError):
            raw.to_bytes(tensor)


def test_tensors_that_wrap_values_are_left_to_torch():
    seen = []
    torch.func.grad(lambda x: (seen.append(raw.memory(x)), x.sum())[1])(torch.ones(2))
    torch.vmap(lambda x: (seen.append(raw.memory(x)), x)[1])(torch.ones(2, 2))
    assert seen == [None, None]
    assert raw.memory(torch.eye(2).to_sparse_csr()) is None
    assert raw.memory(torch.ones(2, device="meta")) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_tensor_is_read_while_torch_traces_without_a_trace_of_it():
    seen = []
    traced = torch.jit.trace(
        lambda x: (seen.append(raw.to_bytes(x).tobytes()), x + 1)[1], torch.ones(3)
    )
    assert seen[0] == np.ones(3, np.float32).tobytes()
    assert [node.kind() for node in traced.graph.nodes()] == [
        "prim::Constant",
        "prim::Constant",
        "aten::add",
    ]


@needs_kernel
def test_threads_do_not_disturb_each_other():
    tensors = [torch.full((n,), float(n)) for n in range(1, 9)]
    wrong = []

    def work(tensor):
        expected = torch_figures(tensor)
        wrong.extend(
            got for got in (figures(tensor) for _ in range(2000)) if got[:2] != expected[:2]
        )

    threads = [threading.Thread(target=work, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_kernel
def test_the_library_is_loaded_under_any_mode(afresh):
    tensor = torch.ones(3)
    with torch.device("meta"), torch.inference_mode():
        assert figures(tensor) == (1, 1, 1, math.sqrt(3), 0, 0, 0)
        assert native.why_not() is None


def test_it_can_be_turned_off(monkeypatch, afresh):
    monkeypatch.setenv("LLMDEBUG_NATIVE", "0")
    assert native.kernel() is None
    assert "LLMDEBUG_NATIVE" in native.why_not()
    assert figures(torch.tensor([3.0, 4.0])) == (3, 4, 3.5, 5, 0, 0, 0)


def test_without_a_library_or_with_a_broken_one_torch_does_it(monkeypatch, tmp_path, afresh):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_summary.so")
    assert "C compiler" in native.why_not()
    native._load.cache_clear()
    native.LIBRARY.write_text("no library", encoding="utf-8")
    assert "can't be loaded" in native.why_not()
    assert figures(torch.tensor([3.0, 4.0])) == (3, 4, 3.5, 5, 0, 0, 0)


@needs_kernel
def test_a_library_that_gives_wrong_figures_is_not_used(monkeypatch, afresh):
    monkeypatch.setattr(native, "_is_right", lambda kernel, name: name != "float16")
    assert native.why_not() == "_summary.so gives wrong figures of float16"
    assert native.kernel() is None


@pytest.fixture
def hook(tmp_path, monkeypatch):
    """Return the build hook's module, which compiles into ``tmp_path``."""
    pytest.importorskip("hatchling")
    path = Path(__file__).parents[1] / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_summary.so")
    monkeypatch.setattr(module, "TAPE", tmp_path / "_tape.so")
    return module


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("false", "false failed"), ("nonesuch -m64", "nonesuch"), ("", "there is no C compiler")],
)
def test_without_a_working_compiler_the_build_says_why_and_leaves_no_library(
    hook, monkeypatch, compiler, why
):
    hook.LIBRARY.write_text("one of other sources", encoding="utf-8")
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(hook.shutil, "which", lambda name: None)
    assert why in hook.build_library()
    assert list(hook.LIBRARY.parent.iterdir()) == []


@pytest.mark.skipif(
    not (shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").is_file()),
    reason="needs cc and Python's headers",
)
def test_the_build_compiles_a_tape_that_passes_its_test(hook, monkeypatch):
    assert hook.build_tape() is None
    monkeypatch.setattr(tape, "LIBRARY", hook.TAPE)
    made = tape._library.__wrapped__()
    assert made is not None
    monkeypatch.setattr(tape, "_library", lambda: made)
    assert tape._make.__wrapped__() is not None


@pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
def test_the_build_compiles_a_library_that_passes_its_test(hook, monkeypatch, afresh):
    assert hook.build_library() is None
    assert [path.name for path in hook.LIBRARY.parent.iterdir()] == ["_summary.so"]
    monkeypatch.setattr(native, "LIBRARY", hook.LIBRARY)
    assert native.why_not() is None


# -- threads --------------------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("name", DTYPES)
def test_figures_do_not_depend_on_the_number_of_threads(name: str) -> None:
    item = DTYPES[name].itemsize
    count = (9 << 20) // item + 12345  # nine shares, and no whole number of blocks
    draw = np.random.default_rng(0)
    bits = draw.integers(0, 256, count * item, np.uint8).view(f"uint{8 * item}")
    if name == "bool":
        bits &= 1
    bits[~np.isfinite(values_of(bits, name))] = 0
    for special in ([], [7, count - 3]):  # NaN in the shares of the first and the last thread
        if special and name not in SPECIAL:
            continue
        bits[special] = SPECIAL.get(name, (0,))[-1]
        tensor = raw.from_bytes(bits.tobytes(), name, (count,))
        seen = set()
        for threads in (1, 2, 3, 5, 16, 200):
            before = torch.get_num_threads()
            try:
                torch.set_num_threads(threads)
                found = figures(tensor)
                look = tape.eye().look(tensor)
            finally:
                torch.set_num_threads(before)
            seen.add(repr(found))
            if look is not None:
                seen.add(repr(tuple(look.content()[2:9])))
        assert len(seen) == 1
        wanted = by_numpy(values_of(bits, name))
        assert agree(found, wanted, values_of(bits, name))
