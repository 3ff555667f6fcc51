"""The kept part of a tensor: slices, figures, budgets, disk space, fingerprints."""

from __future__ import annotations

import json
import math
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

import llmdebug_nb as ld
from llmdebug_nb.capture import payload, recorder
from llmdebug_nb.capture.calls import OpenCall
from llmdebug_nb.capture.recorder import Recorder
from llmdebug_nb.core.kernels import fingerprint, partial
from llmdebug_nb.core.options import DumpOptions
from llmdebug_nb.core.records import RootCall
from llmdebug_nb.store import format as fmt
from llmdebug_nb.store import reader, writer
from llmdebug_nb.store.writer import Writer, create_run
from models import generate, llama
from recordings import change_index

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def record(place: Path, tensors, close=True, **options):
    """Record tensors as outputs of ``m0``, ``m1`` …; return the run and its recorder."""
    folder = create_run(place, "run", {})
    sink = Writer(folder)
    made = Recorder(sink, DumpOptions(**options))
    for number, tensor in enumerate(tensors):
        made.record_tensor(
            OpenCall(f"m{number}", "Op", "module", None, 0, 0), "output", "0", tensor
        )
    if close:
        made.end_call([RootCall(0)])
        sink.close({"complete": True, "lost": dict(made.values.lost)})
    return reader.native(folder), made


# -- parts and figures ------------------------------------------------------------------------


@st.composite
def _indices(draw):
    number = st.integers(-4, 4)
    piece = st.builds(
        lambda a, b, c: (
            f"{'' if a is None else a}:{'' if b is None else b}" + ("" if c is None else f":{c}")
        ),
        st.none() | number,
        st.none() | number,
        st.none() | st.integers(1, 3),
    )
    items = draw(st.lists(number.map(str) | piece, min_size=1, max_size=4))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), "...")
    return ",".join(items)


@settings(max_examples=300, deadline=None)
@given(_indices(), st.lists(st.integers(0, 4), max_size=4))
def test_a_part_is_what_numpy_gives_or_refused_where_numpy_refuses(text, shape):
    values = np.arange(math.prod(shape)).reshape(shape)
    index = partial.parse_index(text)
    try:
        expected = values[index]
    except IndexError:
        with pytest.raises(IndexError):
            partial.cut(torch.from_numpy(values), index)
        return
    got = partial.cut(torch.from_numpy(values), index)
    assert got.shape == expected.shape
    assert np.array_equal(got.numpy(), expected)


@settings(max_examples=200, deadline=None)
@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.float16, np.int64, np.uint8, np.bool_]),
        arrays.array_shapes(max_dims=3),
    ),
    st.integers(2, 30),
)
def test_quantiles_are_those_of_numpy(values, count):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = np.quantile(values.astype(np.float64), np.linspace(0, 1, count))
    got = partial.quantiles(torch.from_numpy(values), count).numpy()
    fine = np.isfinite(expected)  # of infinities numpy makes NaN
    assert np.allclose(got[fine], expected[fine], rtol=1e-12, atol=0)
    assert np.isnan(got).all() == np.isnan(values.astype(np.float64)).any()
    low, high = partial.minmax(torch.from_numpy(values)).tolist()
    assert np.array_equal([low, high], [np.min(values), np.max(values)], equal_nan=True)


def test_quantiles_of_more_elements_than_torch_can_take():
    values = torch.arange(2**24 + 5, dtype=torch.float32).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)
    assert partial.quantiles(values, 3).tolist() == [0.0, (2**24 + 4) / 2, 2.0**24 + 4]


@pytest.mark.parametrize("dtype", FLOATS)
def test_both_ways_to_sort_agree(dtype):
    values = torch.randn(501, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[7], values[8] = math.inf, -math.inf
    places = [np.array([0, 3, 250]), np.array([500])]
    for there, here in zip(
        partial._sorted_there(values, places), partial._sorted_here(values, places), strict=True
    ):
        assert np.array_equal(there, here)
        assert there.dtype == here.dtype == np.float64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.tensor([math.inf, 1.0]), [1.0, math.inf, math.inf]),
        (torch.tensor([-math.inf, 0.0, math.inf]), [-math.inf, 0.0, math.inf]),
        (torch.tensor([-math.inf, math.inf]), [-math.inf, math.nan, math.inf]),
        (torch.tensor([1.0, math.nan]), [math.nan] * 3),
        (torch.tensor([], dtype=torch.int16), [math.nan] * 3),
        (torch.tensor([True, False]), [0.0, 0.5, 1.0]),
        (torch.tensor([3 + 4j, 0j]), [0.0, 2.5, 5.0]),
        (torch.tensor(7), [7.0, 7.0, 7.0]),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), [1.0, 1.5, 2.0]),
        (torch.tensor([5, 7], dtype=torch.uint32), [5.0, 6.0, 7.0]),
    ],
)
def test_every_kind_of_value_has_figures(values, expected):
    assert np.array_equal(partial.quantiles(values, 3).numpy(), expected, equal_nan=True)
    assert np.array_equal(partial.minmax(values).numpy(), expected[::2], equal_nan=True)


# -- in a dump --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_a_slice_is_kept_and_the_statistics_are_of_the_whole(tmp_path, dtype, on_host, monkeypatch):
    monkeypatch.setattr(recorder, "on_host", lambda tensor: on_host)
    values = torch.arange(24.0).reshape(2, 3, 4).to(dtype)
    part, made = record(tmp_path, [values, values.clone()], slice="0, :, -2:")
    whole, _ = record(tmp_path, [values])
    one, two = part.records()
    assert (one.kept, one.kept_shape, one.payload_shape) == ("slice[0,:,-2:]", (3, 2), (3, 2))
    assert torch.equal(part.load(one), values[0, :, -2:])
    assert part.load(one).dtype == dtype
    assert one.summary == two.summary == next(whole.records()).summary
    assert (
        one.payload == two.payload
    ) == on_host  # on a device equal contents are not known to be equal
    assert (made.values.kept, made.values.lost) == (2, {})
    frame = part.to_pandas()
    assert list(frame.kept) == ["slice[0,:,-2:]"] * 2
    assert frame.payload.all()
    assert whole.to_pandas().kept.isna().all()


def test_an_int_drops_its_dimension_and_may_leave_a_scalar(tmp_path):
    run, _ = record(tmp_path, [torch.arange(6.0).reshape(2, 3)], slice="1,2")
    assert run.find("m0").kept_shape == ()
    assert run.tensor("m0") == 5


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_figures_are_kept_in_place_of_the_tensor(tmp_path, on_host, monkeypatch):
    monkeypatch.setattr(recorder, "on_host", lambda tensor: on_host)
    values = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantiles, _ = record(tmp_path, [values], reduce="quantile:11")
    ends, _ = record(tmp_path, [values, torch.arange(3), torch.empty(0)], reduce="minmax")
    assert quantiles.find("m0").kept == "quantile[11]"
    assert np.allclose(
        quantiles.tensor("m0"), np.quantile(values.double().numpy(), np.linspace(0, 1, 11))
    )
    assert quantiles.tensor("m0").dtype == torch.float64
    assert ends.tensor("m0").tolist() == [values.min(), values.max()]
    assert ends.tensor("m1").tolist() == [0.0, 2.0]
    assert ends.tensor("m2").isnan().all()
    assert ends.find("m0").summary == quantiles.find("m0").summary
    assert ends.find("m0").summary.dtype == "bfloat16"


def test_a_slice_that_does_not_fit_is_said_and_the_statistics_are_there(tmp_path):
    run, made = record(
        tmp_path, [torch.ones(2), torch.zeros(2, 3), torch.ones(2), torch.ones(9, 9)], slice=":, 5"
    )
    why = "slice[:,5] asks for 2 dimensions, the tensor has 1"
    assert made.values.lost == {why: 2, "slice[:,5] lies beyond the tensor": 1}
    assert [r.kept for r in run.records()] == [None, None, None, "slice[:,5]"]
    assert run.find("m0").summary.max == 1.0
    with pytest.raises(ld.errors.TensorLookupError, match=r"asks for 2 dimensions"):
        run.tensor("m0")


def test_values_that_cannot_be_read_have_no_figures_and_that_is_said(tmp_path):
    packed = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    _, made = record(tmp_path, [packed], reduce="minmax")
    ((why, count),) = made.values.lost.items()
    assert (count, why.partition(":")[0]) == (1, "no minmax of torch.float4_e2m1fn_x2")


@pytest.mark.parametrize(
    "options", [{"slice": "...,:2"}, {"reduce": "minmax"}, {"reduce": "quantile:5"}]
)
def test_a_killed_recording_of_parts_is_whole_up_to_where_it_was_killed(tmp_path, options):
    tensors = [
        torch.tensor([[1.0, math.nan, math.inf]]),
        torch.tensor([[-1.0, 2.0, -math.inf]]),
        torch.full((1, 3), 7.0),
    ]
    tensors.append(tensors[2].clone())
    torn, made = record(tmp_path, tensors, close=False, **options)
    made.sink.write_frames()  # as a kill leaves it a page of repeated records later
    whole, _ = record(tmp_path, tensors, **options)
    figures = ["min", "max", "mean", "l2norm", "nan", "inf", "zero"]
    columns = ["path", *figures, "fingerprint", "payload", "kept", "shape"]
    assert not torn.info()["complete"]
    assert torn.to_pandas()[columns].equals(whole.to_pandas()[columns])
    for number in range(4):
        assert torn.tensor(f"m{number}").equal(whole.tensor(f"m{number}")) or number == 0
    made.sink.close({})


def test_a_model_recorded_in_parts_opens_everywhere(tmp_path):
    model, runs = llama(), []
    for name in ("golden", "mine"):
        with ld.dump(model, name=name, tokens="0-1", slice="..., -3:") as run:
            generate(model, new=2)
        runs.append(run)
        model.lm_head.weight.data.mul_(1.5)
    run = runs[0]
    assert run.tensor("lm_head", step=1).shape[-1] == 3
    assert run.meta["options"]["slice"] == "...,-3:"
    row = run.find("lm_head").id
    view = ld.compare(*runs).view()
    for shown in (view, ld.compare(run, run).view()):
        shown.detail({"op": "detail", "row": 0})
    detail = _view(run).detail({"op": "detail", "row": row})
    assert [axis["size"] for axis in detail["sides"][0]["axes"]] == list(
        run.find("lm_head").payload_shape
    )
    assert "<img" in ld.compare(*runs).to_html(tmp_path / "report.html").read_text(encoding="utf-8")


def _view(run):
    from llmdebug_nb.show.run_view import RunView

    return RunView(run)


# -- comparing parts --------------------------------------------------------------------------


def _compared(tmp_path, golden, mine, options, others=None):
    runs = [
        record(tmp_path, [golden], **options)[0],
        record(tmp_path, [mine], **(options if others is None else others))[0],
    ]
    (difference,) = ld.compare(*runs).differences
    return difference


def test_equal_parts_are_measured_and_the_statistics_notice_the_rest(tmp_path):
    golden = torch.arange(1.0, 9.0).reshape(2, 4)
    inside, outside, permuted = golden.clone(), golden.clone(), golden.clone()
    inside[0, 0] += 0.5
    outside[1, 3] += 5
    permuted[1] = golden[1].flip(0)
    within = _compared(tmp_path, golden, inside, {"slice": "0"})
    assert (within.verdict, within.reason) == ("diverged", "judged by slice[0] and statistics")
    assert within.metrics["max_absolute_error"] == 0.5
    beyond = _compared(tmp_path, golden, outside, {"slice": "0"})
    assert beyond.verdict == "diverged"
    assert beyond.metrics["max_absolute_error"] == 0.0
    moved = _compared(tmp_path, golden, permuted, {"slice": "0"})
    assert moved.verdict == "within_noise"
    assert moved.reason == "judged by slice[0] and statistics; they agree, though the bytes do not"
    assert _compared(tmp_path, golden, golden.clone(), {"slice": "0"}).verdict == "match"


def test_figures_are_compared_as_figures(tmp_path):
    golden = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    difference = _compared(tmp_path, golden, golden * 1.01, {"reduce": "quantile:9"})
    assert (difference.verdict, difference.reason) == (
        "diverged",
        "judged by quantile[9] and statistics",
    )
    assert difference.metrics["max_ulp"] is None
    assert difference.error == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        ({"slice": "1"}, "golden keeps slice[0], mine slice[1]"),
        ({}, "golden keeps slice[0], mine all of it"),
        ({"reduce": "minmax"}, "golden keeps slice[0], mine minmax"),
        ({"stats_only": True}, "no values on mine"),
    ],
)
def test_different_parts_are_never_compared_with_each_other(tmp_path, mine, reason):
    golden = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    other = _compared(tmp_path, golden, golden * 2, {"slice": "0"}, mine)
    assert (other.verdict, other.reason) == ("diverged", f"judged by statistics: {reason}")
    assert "cosine_similarity" not in other.metrics
    assert _compared(tmp_path, golden, golden.clone(), {"slice": "0"}, mine).verdict == "match"


def test_no_difference_is_drawn_of_different_parts(tmp_path):
    golden = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    runs = [record(tmp_path, [golden], slice=str(row))[0] for row in (0, 1)]
    with pytest.raises(ld.errors.TensorLookupError, match=r"slice\[0\] against slice\[1\]"):
        ld.compare(*runs).view().load(0, "difference")


def test_gradients_are_records_of_their_own_and_pair_with_gradients(tmp_path):
    runs = []
    for factor in (1.0, 2.0):
        folder = create_run(tmp_path, "run", {})
        sink = Writer(folder)
        made = Recorder(sink, DumpOptions())
        call = OpenCall("m", "Linear", "module", "m", 0, 0)
        made.record_tensor(call, "output", "0", torch.ones(3))
        made.record_tensor(call, "output", "0", torch.full((3,), factor), "backward")
        made.record_tensor(call, "grad", "weight", torch.full((2,), factor), "backward")
        made.end_call([RootCall(0)])
        sink.close({"complete": True})
        runs.append(reader.native(folder))
    assert torch.equal(runs[1].tensor("m", phase="backward"), torch.full((3,), 2.0))
    assert torch.equal(runs[1].tensor("m", role="grad", phase="backward"), torch.full((2,), 2.0))
    assert torch.equal(runs[1].tensor("m"), torch.ones(3))
    verdicts = {(d.site.phase, d.site.role): d.verdict for d in ld.compare(*runs).differences}
    assert verdicts == {
        ("forward", "output"): "match",
        ("backward", "output"): "diverged",
        ("backward", "grad"): "diverged",
    }
    assert (
        str(runs[0].find("m", role="grad", phase="backward").site)
        == "m backward grad[weight] step 0"
    )


# -- room -------------------------------------------------------------------------------------


def _numbered(count, size=1000):
    return [torch.full((size,), float(number)) for number in range(count)]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_beyond_the_budget_only_statistics_are_kept_and_nothing_small_slips_in(
    tmp_path, on_host, monkeypatch
):
    monkeypatch.setattr(recorder, "on_host", lambda tensor: on_host)
    tensors = [*_numbered(3), torch.ones(2), torch.full((1000,), 1.0)]
    run, made = record(tmp_path, tensors, max_bytes="8.5kB")
    why = "over the budget of 8.5 kB (max_bytes)"
    held = [r.payload is not None for r in run.records()]
    # the last repeats a kept one, which is known on the host
    assert held == [True, True, False, False, on_host]
    assert made.values.lost == {why: 5 - sum(held)}
    assert [r.summary.max for r in run.records()] == [0.0, 1.0, 2.0, 1.0, 1.0]
    assert made.values.distinct == 2
    with pytest.raises(ld.errors.TensorLookupError, match="over the budget"):
        run.tensor("m2")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 200))
def test_the_budget_is_never_exceeded_and_what_is_kept_is_a_beginning(sizes, budget):
    policy = payload.Policy(DumpOptions(max_bytes=budget), lambda nbytes: None)
    kept = []
    for size in sizes:
        try:
            policy.admit(size)
            kept.append(size)
        except payload.NotKept:
            pass
    assert sum(kept) <= budget
    assert kept == sizes[: len(kept)]
    assert len(kept) == len(sizes) or sum(sizes[: len(kept) + 1]) > budget


def test_the_budget_counts_what_is_written_of_a_part(tmp_path):
    run, made = record(tmp_path, _numbered(5), slice=":10", max_bytes=130)
    assert made.values.distinct == 3
    assert [r.kept for r in run.records()] == ["slice[:10]"] * 3 + [None] * 2


def test_a_disk_that_fills_up_ends_the_payloads_and_not_the_recording(tmp_path, monkeypatch):
    left = [writer.FLOOR + 10_000]
    monkeypatch.setattr(payload, "LOOK_AGAIN", 8_000)
    run_tensors = _numbered(8)
    asked = []

    def free(folder):
        asked.append(folder)
        return left[0] - 4000 * max(0, len(asked) - 1)

    monkeypatch.setattr(writer, "free_space", free)
    run, made = record(tmp_path, run_tensors)
    why = "the disk has less than 256 MiB left"
    assert made.values.lost == {why: 8 - made.values.distinct}
    assert 0 < made.values.distinct < 8
    assert len(asked) < 1 + 8 / 2  # not for every tensor
    found = [record.lost for record in run.records()]
    assert found == [None] * made.values.distinct + [why] * (8 - made.values.distinct)
    assert run.find("m7").summary.max == 7.0


def test_one_payload_that_is_larger_than_what_is_left_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "free_space", lambda folder: writer.FLOOR + 100)
    monkeypatch.setattr(payload, "LOOK_AGAIN", 4_000)
    _, made = record(tmp_path, _numbered(1))
    assert made.values.lost == {"the disk has less than 256 MiB left": 1}


@pytest.mark.parametrize(
    ("options", "free", "message"),
    [
        (
            {},
            (256 << 20) - 1,
            r"255 MiB are free and 256 MiB are needed; free some, .*path=.*stats_only=True.*16 MiB",
        ),
        (
            {"stats_only": True},
            (16 << 20) - 1,
            r"15 MiB are free and 16 MiB are needed; free some, .*path=$",
        ),
    ],
)
def test_a_nearly_full_disk_is_refused_before_the_model_runs(
    tmp_path, monkeypatch, options, free, message
):
    monkeypatch.setattr(writer, "free_space", lambda folder: free)
    model, ran = nn.Linear(2, 2), []
    with (
        pytest.raises(ld.errors.DumpWriteError, match=message),
        ld.dump(model, path=tmp_path / "deep", **options),
    ):
        ran.append(1)
    assert not ran
    assert not (tmp_path / "deep").exists()
    assert not model._forward_hooks


def test_statistics_need_little_room(monkeypatch):
    monkeypatch.setattr(writer, "free_space", lambda folder: 17 << 20)
    model = nn.Sequential(nn.Linear(2, 2))
    with ld.dump(model, stats_only=True) as run:
        model(torch.ones(1, 2))
    assert len(run) > 0


def test_free_space_is_asked_of_the_nearest_folder_that_is_there(tmp_path, monkeypatch):
    asked = []

    class Usage:
        total, free = 100, 7

    monkeypatch.setattr(
        writer.shutil, "disk_usage", lambda place: (asked.append(Path(place)), Usage)[1]
    )
    assert writer.free_space(tmp_path / "a" / "b") == 7
    assert asked == [tmp_path]
    Usage.total = 0
    assert writer.free_space(tmp_path) == sys.maxsize


def test_a_disk_that_does_not_answer_counts_as_large(tmp_path, monkeypatch):
    def refuse(place):
        raise OSError("no answer")

    monkeypatch.setattr(writer.shutil, "disk_usage", refuse)
    assert writer.free_space(tmp_path) == sys.maxsize


# -- fingerprints -----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=70))
def test_other_fingerprints_are_what_they_are_called(data):
    array = np.frombuffer(data, np.uint8)
    assert fingerprint.crc32(array) == f"crc32:{zlib.crc32(data):08x}"
    words = 0
    for at in range(0, len(data), 8):
        words ^= int.from_bytes(data[at : at + 8], "little")
    assert fingerprint.xor(array) == f"xor:0x{words:016x}"


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("algorithm", ["crc32", "xor"])
def test_another_fingerprint_is_shown_while_contents_are_told_apart_by_their_own(
    tmp_path, monkeypatch, algorithm, on_host
):
    monkeypatch.setattr(recorder, "on_host", lambda tensor: on_host)
    one = torch.tensor([1, 2, 3, 4])
    permuted = one.flip(0).contiguous()  # of equal XOR
    run, _ = record(tmp_path, [one, permuted, one.clone()], fingerprint=algorithm)
    shown = [r.summary.fingerprint for r in run.records()]
    data = np.frombuffer(one.numpy().tobytes(), np.uint8)
    assert shown[0] == shown[2] == fingerprint.ALGORITHMS[algorithm](data)
    assert (shown[0] == shown[1]) == (algorithm == "xor")
    assert torch.equal(run.tensor("m1"), permuted)
    assert torch.equal(run.tensor("m2"), one)


def test_fingerprints_of_different_kinds_say_nothing_of_equality(tmp_path):
    values = torch.tensor([1.0, 2.0])
    difference = _compared(
        tmp_path, values, values.clone(), {"fingerprint": "crc32"}, {"fingerprint": "xor"}
    )
    assert (difference.verdict, difference.reason) == ("match", None)


# -- hostile indexes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE records SET kept_shape = 'x'",
        "UPDATE records SET kept_shape = NULL",
        "UPDATE records SET kept_shape = '[-1]'",
        "UPDATE records SET kept_shape = x'ff00'",
        "UPDATE records SET kept_shape = '{}'",
        "UPDATE records SET kept_shape = '[1000000000000, 1000000000000]'",
        f"UPDATE records SET kept_shape = '{'[' * 100_000}'",
        "UPDATE records SET kept = 'everything'",
        "UPDATE records SET kept = 'slice[[0]]'",
        "UPDATE records SET kept = x'00'",
        "UPDATE records SET kept = 'minmax'",
        "UPDATE records SET kept = NULL",
        "UPDATE records SET length = 1 << 60",
    ],
)
def test_lies_about_a_part_are_refused(tmp_path, sql):
    run, _ = record(tmp_path, [torch.arange(12.0).reshape(3, 4)], slice="0")
    change_index(run.path, sql)
    with pytest.raises(ld.errors.CorruptDumpError) as error:
        reader.native(run.path).tensor("m0")
    assert len(str(error.value)) < 500


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.none() | st.integers() | st.floats() | st.text(max_size=9) | st.just([]) | st.just({}),
        min_size=25,
        max_size=25,
    )
)
def test_a_frame_of_nonsense_is_refused_and_never_a_crash(tmp_path_factory, fields):
    folder = create_run(tmp_path_factory.mktemp("frames"), "r", {})
    sink = Writer(folder)
    header = json.dumps({"__metadata__": {"record": json.dumps(fields)}}).encode()
    header += b" " * (-len(header) % 8)
    (sink.folder / fmt.PAYLOAD).write_bytes(len(header).to_bytes(8, "little") + header)
    try:
        list(reader.native(folder).records())
    except ld.errors.CorruptDumpError:
        pass
    finally:
        sink.close({})
