"""The tape on a device, with one that is none: its rows are those of the host."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
from fake_device import fake_device
from llmdebug_nb.capture.tape import native
from models import generate, llama

pytestmark = pytest.mark.skipif(native.tape(False) is None, reason="there is no tape here")
COLUMNS = [
    "step", "path", "call", "role", "slot", "dtype", "shape", "min", "max", "nan", "inf", "zero",
    "producer", "views",
]  # fmt: skip


def rows(model, work, name="run", **options):
    with ld.dump(model, name=name, stats_only=True, tokens="all", **options) as run:
        work()
    return run.to_pandas()


def assert_same(here, there):
    columns = [name for name in COLUMNS if name in here]
    assert here[columns].equals(there[columns])
    for name in ("mean", "l2norm"):
        for a, b in zip(here[name], there[name], strict=True):
            assert math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) or (a != a and b != b)
    assert there.fingerprint.isna().all()


@pytest.mark.parametrize("mode", ["module", "module+aten"])
def test_a_model_has_the_same_records_there_and_equal_tensors_are_measured_once(mode, monkeypatch):
    model = llama()
    work = lambda: generate(model, new=3)  # noqa: E731
    here = rows(model, work, "here", mode=mode)
    with fake_device(monkeypatch) as device:
        there = rows(model, work, "there", mode=mode)
    assert_same(here, there)
    assert (there.device == "cuda:0").mean() > 0.7  # others went the long way, which learns of them
    assert 0 < device.launches < 0.8 * len(there)
    assert {packed for _, packed, _ in device.kernels} == ({1} if mode == "module" else {0, 1})


class Same(nn.Module):
    def forward(self, x):
        return x.clone(memory_format=torch.preserve_format)


class Twice(nn.Module):
    """Changes its input after a part has seen it."""

    def __init__(self):
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x):
        seen = self.part(x)
        x.mul_(2)
        return self.part(seen)


LAYOUTS = {
    "packed": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced inside": lambda x: x[:, 5:11],
    "sliced outside": lambda x: x[3:7],
    "every second": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 7],
    "permuted and sliced": lambda x: x.reshape(4, 8, 60).permute(1, 0, 2)[..., :30],
    "three dimensions with gaps": lambda x: x.reshape(4, 8, 60)[:, ::2, :7],
    "expanded": lambda x: x[:1].expand(5, -1),
    "overlapping": lambda x: x.flatten()[:50].unfold(0, 6, 2),
    "from an odd byte on": lambda x: x.flatten()[1:],
    "one element": lambda x: x[3, 4],
    "empty": lambda x: x[:0],
    "negated": lambda x: torch.imag(torch.complex(x.float(), x.float()).conj()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.uint16], ids=str
)
def test_tensors_of_all_layouts_are_measured_there(layout, dtype, monkeypatch):
    x = LAYOUTS[layout](torch.arange(32 * 60).reshape(32, 60).remainder(97).to(dtype))
    model = nn.Sequential(Same())
    with torch.no_grad():
        here = rows(model, lambda: model(x), "here")
        with fake_device(monkeypatch):
            there = rows(model, lambda: model(x), "there")
    if layout != "empty":
        assert_same(here, there)
    assert len(here) == len(there)


def test_tensors_of_many_rows_and_values_that_are_not_finite(monkeypatch):
    x = torch.randn(300, 4000)
    x[7, 9], x[200, 3], x[250, 1] = math.inf, math.nan, 0
    model = nn.Sequential(Same(), nn.Identity())
    with torch.no_grad():
        here = rows(model, lambda: model(x), "here")
        with fake_device(monkeypatch):
            there = rows(model, lambda: model(x), "there")
    assert_same(here, there)


def test_a_tensor_that_changes_in_place_is_measured_anew(monkeypatch):
    with torch.no_grad(), fake_device(monkeypatch):
        model = Twice()
        there = rows(model, lambda: model(torch.full((8,), 3.0)))
    found = there[there.path == "part"]
    assert found["max"].tolist() == [3, 3, 6, 6]


class AddsInPlace(nn.Module):
    def forward(self, x):
        y = x.clone()
        for _ in range(3):
            y.add_(1)
            z = y * 1
        return y.relu_(), z, y.index_fill_(0, torch.tensor([0]), 7)


@pytest.mark.parametrize("part", ["both", "in", "out"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "statistics"])
def test_what_an_operator_changes_in_place_is_recorded_as_it_is_then(
    part, grad, tensors, monkeypatch
):
    model, x = AddsInPlace(), torch.full((8,), 3.0)

    def record(name):
        options = {"mode": "module+aten", "part": part, "stats_only": not tensors}
        with ld.dump(model, name=name, tokens="all", **options) as run:
            for _ in range(3):
                model(x)
        return run

    with torch.set_grad_enabled(grad):
        here = record("here")
        with fake_device(monkeypatch):
            there = record("there")
    columns = ["step", "path", "call", "role", "slot", "min", "max", "l2norm"]
    assert here.to_pandas()[columns].equals(there.to_pandas()[columns])
    for a, b in zip(here.records(), there.records(), strict=True):
        assert not tensors or torch.equal(here.load(a), there.load(b))


def test_what_a_collective_changes_is_measured_anew(monkeypatch):
    class Reduces(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.rest = Same(), nn.Identity()

        def forward(self, x):
            y = self.part(x)
            torch.distributed.all_reduce(y)
            return self.rest(y)

    def doubled(tensor, *args, **kwargs):
        tensor.data.mul_(2)  # counts no version

    monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
    model = Reduces()
    with torch.no_grad(), fake_device(monkeypatch):
        there = rows(model, lambda: model(torch.full((8,), 3.0)))
    assert there["max"][there.path == "rest"].tolist() == [6, 6]


def test_what_cannot_be_read_back_is_said_and_the_dump_stays_whole(monkeypatch):
    from llmdebug_nb.core.kernels import on_device

    model, x, fails = nn.Sequential(Same()), torch.randn(5), [False]
    read = on_device.Page.read

    def failing(page, used):
        if fails[0]:
            raise RuntimeError("CUDA error: device-side assert triggered\nand more")
        return read(page, used)

    monkeypatch.setattr(on_device.Page, "read", failing)
    with (
        torch.no_grad(),
        fake_device(monkeypatch),
        ld.dump(model, name="run", stats_only=True) as run,
    ):
        model(x)
        fails[0] = True
        model(x)
        fails[0] = False
        model(x)
    found = ld.open_run("run").to_pandas()
    lost = found.lost.notna()
    assert found.step[lost].unique().tolist() == [1]
    assert lost.sum() == 4
    assert all("device-side assert triggered" in why for why in found.lost[lost])
    assert found.l2norm[~lost].notna().all()
    assert run.info()["lost"] == 4


def test_storages_that_follow_each_other_at_one_address_are_told_apart(monkeypatch):
    model = nn.Sequential(Same())
    values = [float(number) for number in range(200)]

    def work():
        for value in values:
            model(torch.full((1000,), value))

    with torch.no_grad(), fake_device(monkeypatch):
        there = rows(model, work)
    assert there[(there.role == "input") & (there.path == "0")]["max"].tolist() == values


def test_more_tensors_than_a_page_holds_are_all_read(monkeypatch):
    monkeypatch.setattr("llmdebug_nb.core.kernels.on_device.ROWS", 16)
    parts = nn.Sequential(*[Same() for _ in range(60)])
    x = torch.randn(12_000)  # two rows each
    with torch.no_grad():
        here = rows(parts, lambda: parts(x), "here")
        with fake_device(monkeypatch):
            there = rows(parts, lambda: parts(x), "there")
    assert_same(here, there)


@pytest.mark.parametrize("trouble", ["refuses", "capturing"])
def test_where_no_kernel_can_be_launched_the_long_way_is_gone(trouble, monkeypatch):
    x = torch.randn(5, 6)
    model = nn.Sequential(Same(), nn.Linear(6, 2))
    with torch.no_grad():
        here = rows(model, lambda: model(x), "here")
        with fake_device(monkeypatch) as device:
            setattr(device, trouble, True)
            there = rows(model, lambda: model(x), "there")
    assert_same(here, there)
    assert device.launches == 0
    assert set(there.device) == {"cpu"}


def test_what_was_measured_before_a_graph_is_captured_is_not_read_back_meanwhile(monkeypatch):
    from llmdebug_nb.core.kernels import on_device, raw

    model, x = nn.Sequential(Same()), torch.randn(5)
    captured, read = [False], on_device.Page.read

    def checked(page, used):
        assert not captured[0]
        return read(page, used)

    monkeypatch.setattr(raw, "captures_graph", lambda: captured[0])
    monkeypatch.setattr(on_device.Page, "read", checked)
    options = {"stats_only": True, "mode": "module+aten"}
    with (
        torch.no_grad(),
        fake_device(monkeypatch) as device,
        ld.dump(model, name="run", **options) as run,
    ):
        model(x)
        x + 1  # between the calls, as capturing a graph does
        captured[0] = device.capturing = True
        model(x)
        captured[0] = device.capturing = False
        model(x)
    found = run.to_pandas()
    lost = found.lost.notna()
    assert (lost == found.l2norm.isna()).all()
    assert all("CUDA graph" in why for why in found.lost[lost])
    assert lost[found.step == 1].all()
    assert not lost[found.step == 2].any()
    assert (found.step == 2).sum() == (found.step == 1).sum() > 4
    assert run.info()["lost"] == lost.sum()


def test_a_library_of_other_sources_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "_VERSION", -1)
    for cached in (native._library, native._make):
        cached.cache_clear()
    try:
        assert native.tape(False) is None
        model = nn.Sequential(Same())
        assert len(rows(model, lambda: model(torch.ones(3)), mode="module+aten")) > 2
    finally:
        for cached in (native._library, native._make):
            cached.cache_clear()


def test_where_triton_cannot_compile_torch_measures(monkeypatch):
    from llmdebug_nb.core.kernels import on_device

    def compiled(*args):
        raise OSError("Failed to find C compiler")

    monkeypatch.setattr(on_device, "compiled", compiled)
    on_device._kernel_works.cache_clear()
    with pytest.warns(UserWarning, match="by PyTorch, which is slower.*Failed to find C compiler"):
        assert not on_device._kernel_works(torch.device("cuda", 0))
    on_device._kernel_works.cache_clear()


def test_c_and_python_divide_tensors_among_programs_alike():
    from llmdebug_nb.core.kernels import on_device

    header = Path(native.__file__).with_name("device.h").read_text(encoding="utf-8")
    found = re.search(r"OF_PROGRAM = 1 << (\d+), MOST_PROGRAMS = (\d+), BLOCK = (\d+)", header)
    shift, programs, block = map(int, found.groups())
    ours = on_device._OF_PROGRAM, on_device._MOST_PROGRAMS, on_device._BLOCK
    assert (1 << shift, programs, block) == ours
    assert 2**31 - programs * block == on_device._LARGEST  # the counter of its loop has 32 bits
