"""What one call of C sees of a tensor, beside the way of all other tensors."""

from __future__ import annotations

import ctypes
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmdebug_nb as ld
from llmdebug_nb.capture import known_weights
from llmdebug_nb.capture.geometry import shape_text
from llmdebug_nb.capture.hooks.modules import Root
from llmdebug_nb.capture.tape import native
from llmdebug_nb.core.kernels import native as kernel
from llmdebug_nb.core.kernels import overflow
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.raw import dtype_name, to_bytes
from llmdebug_nb.core.kernels.summary import figures

needs_tape = pytest.mark.skipif(
    native.tape(False) is None, reason=str(kernel.why_not() or "it was not built")
)

DTYPES = [*kernel.KINDS]


@st.composite
def tensors(draw):
    """Draw a view of a tensor in any dtype that the kernel knows: permuted, cut, expanded."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    numel = math.prod(shape)
    raw = np.frombuffer(
        draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize)), np.uint8
    ).copy()
    tensor = (
        torch.from_numpy(raw & 1).bool()
        if dtype is torch.bool
        else torch.from_numpy(raw).view(dtype)
    )
    tensor = tensor.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = draw(st.integers(0, tensor.shape[dim] - 1))
        tensor = tensor.narrow(dim, start, draw(st.integers(1, tensor.shape[dim] - start)))
        steps = [slice(None)] * dim + [slice(None, None, draw(st.integers(1, 2)))]
        tensor = tensor[tuple(steps)]
    return tensor.expand(draw(st.integers(1, 3)), *tensor.shape) if draw(st.booleans()) else tensor


@needs_tape
@given(tensors())
def test_what_is_seen_is_what_the_way_of_other_tensors_gives(tensor):
    found = native.Content(*native.eye().look(tensor).content())
    assert (found.dtype, found.shape) == (dtype_name(tensor), shape_text(tensor))
    assert found.fingerprint == fingerprint(to_bytes(tensor))
    expected = figures(tensor.contiguous())
    assert found[6:9] == expected[4:]
    assert found[2:6] == pytest.approx(expected[:4], rel=1e-12, nan_ok=True)


@needs_tape
def test_what_was_seen_stays_as_it_was_when_the_program_writes_to_it():
    tensor = torch.ones(4)
    seen = native.eye().look(tensor)
    tensor.zero_()
    assert native.Content(*seen.content()).max == 1


@needs_tape
def test_large_tensors_of_equal_bytes_and_other_dtypes_have_their_own_figures():
    bits = torch.arange(4096, dtype=torch.int32)
    of = [
        native.Content(*native.eye().look(each).content())
        for each in (bits, bits.view(torch.int16))
    ]
    assert [each.max for each in of] == [4095, 4095]
    assert [each.shape for each in of] == ["[4096]", "[8192]"]
    assert [each.zero for each in of] == [1, 4097]
    assert of[0].fingerprint == of[1].fingerprint


class _Wrapper(torch.Tensor):
    pass


def _freed() -> torch.Tensor:
    tensor = torch.ones(100)[50:]
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_tape
@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.ones(2).as_subclass(_Wrapper),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.complex64).conj().imag,
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.ones(2, 1 << 18).t(),
        torch.ones(1).expand(1 << 40),
        torch.ones((1,) * 9),
        _freed(),
    ],
    ids=["empty", "subclass", "complex", "negative", "fp8", "large", "endless", "deep", "freed"],
)
def test_what_is_not_for_it_is_left_to_the_other_way(tensor):
    assert native.eye().look(tensor) is None


# -- large weights --------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda w: w.view(-1, 300).t(),
    "few rows": lambda w: w.view(-1, 7).t(),
    "few columns": lambda w: w.view(3, -1).t(),
    "experts": lambda w: w.view(5, -1, 63).transpose(1, 2),
    "cut and transposed": lambda w: w.view(-1, 300)[:, 1:290].t(),
    "every second row of a transposed one": lambda w: w.view(-1, 300)[:, ::2].t(),
    "three axes in another order": lambda w: w.view(20, 9, -1).permute(2, 0, 1),
    "long lines": lambda w: w.view(2, -1)[:, 1:],
    "every second": lambda w: w[::2],
}


def _weight(dtype: torch.dtype) -> torch.Tensor:
    """Return 1.7 MB or more whose elements all count: other strips, or an order, would be seen."""
    bits = torch.randint(0, 256, (900 * 630 * 3,), generator=torch.Generator().manual_seed(0))
    if dtype.is_floating_point:
        return bits.double().sub(128).mul(1 + torch.arange(len(bits)) % 7).to(dtype)
    return bits.to(dtype)


def _eye(*weights: torch.Tensor) -> native.Eye:
    known, eye = known_weights.KnownWeights(), native.eye()
    known.share(eye)
    known.add([*weights], lambda weight: weight)
    return eye


@needs_tape
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_weight_is_measured_in_strips_as_a_copy_of_it_would_be(dtype, layout):
    whole = _weight(dtype)
    weight = LAYOUTS[layout](whole)
    assert not weight.is_contiguous()
    copy = weight.contiguous()
    found = _eye(whole).look(weight).content()
    at_once = _eye().look(copy).content()
    assert found == _eye(copy).look(copy).content() == at_once
    assert native.Content(*found).fingerprint == fingerprint(to_bytes(copy))


@needs_tape
@pytest.mark.parametrize("place", [0, 1 << 14, (1 << 20) - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_counted_in_any_strip(value, place):
    whole = torch.ones(1 << 20)
    weight = whole.view(1 << 10, 1 << 10).t()
    weight[divmod(place, 1 << 10)] = value
    found = native.Content(*_eye(whole).look(weight).content())
    assert (found.nan, found.inf) == ((1, 0) if math.isnan(value) else (0, 1))
    assert found.max == pytest.approx(value, nan_ok=True)
    assert found.min == pytest.approx(math.nan if math.isnan(value) else 1, nan_ok=True)


@needs_tape
def test_what_looks_at_a_weight_tells_the_others_unless_it_may_have_changed():
    weight, known = torch.zeros(300, 300), known_weights.KnownWeights()
    known.add([weight], lambda weight: weight)
    eyes = native.eye(), native.eye()
    for eye in eyes:
        known.share(eye)
    assert eyes[0].look(weight.t()).content()[3] == 0
    # between the words of the sample, and without a new version
    words = weight.data.view(-1).view(torch.float64)
    words[1 : words.numel() // 64] = 2.0**100
    assert eyes[1].look(weight.t()).content()[3] == 0
    assert eyes[1].look(weight.t(), False, True).content()[3] > 0
    assert eyes[0].look(weight.t()).content()[3] > 0


@needs_tape
def test_a_large_weight_is_measured_also_where_a_tape_gave_its_memory_back():
    whole = [torch.ones(20_000, 32) * number for number in range(2)]  # in strips of 1.3 MB
    eye = _eye(*whole)
    for each in whole:
        assert eye.look(each.t()) is not None
        eye.forget()


def test_a_root_has_the_weights_of_the_modules_that_it_has_now():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    root = Root(model, "", hooks_inside=True)
    assert [*map(id, root.weights())] == [*map(id, model.parameters())]
    model.append(torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)))
    assert [*map(id, root.weights())] == [*map(id, model.parameters())]
    model[1][0] = torch.nn.Linear(4, 3)
    assert [*map(id, root.weights())] == [*map(id, model.parameters())]
    gone = weakref.ref(model[0].weight)
    model[0].weight = torch.nn.Parameter(torch.ones(4, 4))
    assert gone() is None
    assert [*map(id, root.weights())] == [*map(id, model.parameters())]


@needs_tape
@pytest.mark.parametrize("given", [(), ({},), ({}, []), ({}, {})], ids=str)
def test_an_eye_learns_of_weights_once(given):
    eye = _eye()
    with pytest.raises(ValueError, match="weigh once, with two dictionaries"):
        eye.weigh(*given)


@needs_tape
@pytest.mark.parametrize(
    "options", [{}, {"stats_only": True}, {"fingerprint": "crc32"}, {"part": "out"}], ids=str
)
def test_a_recording_is_the_same_with_and_without_it(options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Flatten(0), torch.nn.Identity()
    )
    given = torch.randn(3, 4).t().contiguous().t()

    def rows(name):
        with ld.dump(model, name=name, path=tmp_path, tokens="all", **options) as run:
            for _ in range(3):
                model(given)
        frame = run.to_pandas()
        values = {
            (r.path, r.step, r.role, r.slot): run.tensor(r.path, step=r.step, role=r.role,
                slot=r.slot)
            for r in frame.itertuples()
        } if not options.get("stats_only") else {}  # fmt: skip
        return frame, values, run.info()

    with_it = rows("with")
    monkeypatch.setattr(native, "_make", lambda: None)
    monkeypatch.setattr(native, "_make", lambda: None)
    without = rows("without")
    assert with_it[0].drop(columns="l2norm").equals(without[0].drop(columns="l2norm"))
    assert with_it[0].l2norm.tolist() == pytest.approx(without[0].l2norm.tolist(), rel=1e-12)
    assert with_it[1].keys() == without[1].keys()
    assert all(torch.equal(a, without[1][site]) for site, a in with_it[1].items())
    same = ("records", "steps", "payloads", "bytes", "complete")
    assert [with_it[2][name] for name in same] == [without[2][name] for name in same]


def test_a_weight_is_read_again_once_it_was_changed_in_any_way(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, bias=False)
    assert model.weight.nbytes > known_weights.SMALL
    with (
        ld.dump(
            model, name="run", path=tmp_path, tokens="all", mode="aten", stats_only=True
        ) as run,
        torch.no_grad(),
    ):
        model(torch.ones(1, 256))
        model(torch.ones(1, 256))
        model.weight.mul_(2)
        model(torch.ones(1, 256))
        model.weight.data.mul_(2)  # torch counts no change of this
        model(torch.ones(1, 256))
        model.weight.data = torch.zeros(256, 256)
        model(torch.ones(1, 256))
    frame = run.to_pandas()
    weights = frame[(frame.role == "input") & (frame["shape"].map(tuple) == (256, 256))]
    norm = model.weight.new_tensor(0)
    assert len(weights) == 5
    first = weights.l2norm.iloc[0]
    assert weights.l2norm.tolist() == pytest.approx(
        [first, first, 2 * first, 4 * first, float(norm)]
    )
    assert weights.fingerprint.nunique() == 4


# -- the largest magnitude ------------------------------------------------------------------------

reads = pytest.mark.skipif(
    kernel.tensor_function("llmdebug_reach", ctypes.c_double) is None,
    reason="the library was built of older sources",
)


@reads
@given(tensors())
def test_the_largest_magnitude_is_the_one_that_torch_finds(tensor):
    found, expected = overflow.quick_reach()(tensor), overflow.torch_reach(tensor)
    if expected is None:
        assert found == overflow.NONE
    else:
        assert found == expected or (math.isnan(found) and math.isnan(expected))


@reads
@pytest.mark.parametrize("tensor", [
    torch.zeros(0), torch.ones(2).to_sparse(), torch.ones(2, device="meta"),
    torch.ones(2, dtype=torch.complex64), torch.ones(2).to(torch.float8_e4m3fn),
])  # fmt: skip
def test_the_largest_magnitude_of_special_tensors_is_left_to_torch(tensor):
    assert overflow.quick_reach()(tensor) == overflow.ASK_TORCH


@reads
def test_freed_memory_is_not_read_for_its_largest_magnitude():
    tensor = torch.ones(64)[8:]
    tensor.untyped_storage().resize_(0)
    assert overflow.quick_reach()(tensor) == overflow.ASK_TORCH
