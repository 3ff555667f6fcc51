"""What a recording of llama.cpp is made of, without llama.cpp."""

from __future__ import annotations

import sys
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmdebug_nb.capture.compat import llamacpp_api
from llmdebug_nb.capture.compat.ggml_tensors import Library, strided
from llmdebug_nb.capture.compat.llamacpp_api import BatchRow
from llmdebug_nb.capture.engines import llamas
from llmdebug_nb.capture.engines.ggml_axes import Shape, tokens_first, tokens_of
from llmdebug_nb.capture.engines.ggml_graph import Graph, GraphNode, Keys, NodeKey, has_values
from llmdebug_nb.capture.engines.llamacpp_runtime import LLAMA_CPP
from llmdebug_nb.capture.engines.texts import Texts, parts_of
from llmdebug_nb.capture.request_filter import Part
from llmdebug_nb.core.errors import CaptureError

F32 = 0


@given(
    st.tuples(*[st.integers(1, 4)] * 4),
    st.permutations(range(4)),
    st.integers(0, 2),
)
def test_strides_in_any_order_and_with_gaps_are_read(
    shape: tuple[int, ...], order: list[int], gap: int
) -> None:
    # independent: NumPy's own view of a padded, transposed array
    padded = tuple(shape[axis] + gap for axis in order)
    whole = np.arange(np.prod(padded), dtype="<f4").reshape(padded)
    part = whole[tuple(slice(shape[axis]) for axis in order)]
    expected = part.transpose(np.argsort(order))
    found = strided(whole.view(np.uint8).ravel(), F32, shape, expected.strides)
    assert found.tolist() == expected.tolist()
    assert found.is_contiguous()


@given(
    st.binary(max_size=64),
    st.tuples(*[st.integers(-2, 2**62)] * 4),
    st.tuples(*[st.integers(0, 2**63 - 1)] * 4),
    st.integers(-1, 40),
)
def test_hostile_shapes_and_strides_are_refused_or_lie_inside(
    data: bytes, shape: tuple[int, ...], strides: tuple[int, ...], kind: int
) -> None:
    try:
        found = strided(np.frombuffer(data, np.uint8).copy(), kind, shape, strides)
    except CaptureError:
        return
    ends = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    assert found.numel() == 0 or ends + found.element_size() <= len(data)


def test_quantised_values_are_refused_with_their_type() -> None:
    with pytest.raises(CaptureError, match="type 8"):
        strided(np.zeros(64, np.uint8), 8, (1, 1, 1, 32), (64, 64, 64, 2))


def test_a_library_of_another_release_is_named_with_what_it_lacks() -> None:
    import ctypes

    with pytest.raises(CaptureError, match=r"llama_cpp 9\.9: ggml has no 'ggml_tensor_overhead'"):
        Library(ctypes.CDLL(None), "9.9")


def test_a_llama_is_known_only_if_the_program_imported_llama_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    assert not LLAMA_CPP.is_model(object())
    assert "llama_cpp" not in sys.modules
    module = types.ModuleType("llama_cpp")
    module.Llama = type("Llama", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    assert LLAMA_CPP.is_model(module.Llama())  # type: ignore[attr-defined]
    assert not LLAMA_CPP.is_model(module.Llama)  # type: ignore[attr-defined]


class _Llama:
    """Stands for ``llama_cpp.Llama``, without a context."""

    def eval(self, tokens: list[int]) -> int:
        return len(tokens)


def test_a_llama_is_followed_once_from_the_call_that_computes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("llama_cpp")
    package.Llama = _Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    begun: list[object] = []
    monkeypatch.setattr(llamas, "LlamaSteps", lambda llama, parts: begun.append(llama) or _Steps())
    own, one, other = vars(_Llama)["eval"], _Llama(), _Llama()
    followed = llamas.Llamas(types.SimpleNamespace(), [], only=False)  # type: ignore[arg-type]
    followed.start()
    try:
        assert [one.eval([1, 2]), one.eval([3]), other.eval([])] == [2, 1, 0]
    finally:
        followed.stop()
    assert begun == [one, other]
    assert vars(_Llama)["eval"] is own
    assert one.eval([1]) == 1


class _Steps:
    def start(self) -> None: ...
    def stop(self) -> None: ...


def test_a_llama_that_cannot_be_recorded_computes_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise CaptureError("no memory for a second context")

    monkeypatch.setattr(llamas, "LlamaSteps", refused)
    problems: Counter[str] = Counter()
    parts = types.SimpleNamespace(guard=types.SimpleNamespace(problems=problems))
    followed = llamas.Llamas(parts, [], only=False)  # type: ignore[arg-type]
    one = _Llama()
    followed.computes(one)
    followed.computes(one)
    assert problems == {"no memory for a second context": 1}


def test_a_missing_attribute_is_named_with_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("llama_cpp")
    module.__version__ = "0.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    with pytest.raises(CaptureError, match=r"llama_cpp 0\.1: object has no '_ctx'"):
        llamacpp_api.needed(object(), "_ctx")


# -- the axis of the tokens -----------------------------------------------------------------------


def strides(*ne: int) -> tuple[int, ...]:
    return tuple(4 * int(np.prod(ne[:axis])) for axis in range(len(ne)))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 6))
def test_tokens_are_followed_through_attention(tokens: int, heads: int, width: int) -> None:
    hidden = Shape((heads * width, tokens, 1, 1), strides(heads * width, tokens, 1, 1), tokens=1)
    none = (0,) * 16
    split = (width, heads, tokens, 1)
    of_heads = tokens_of("RESHAPE", split, strides(*split), none, [hidden])
    if heads > 1 or tokens > 1:  # one head of one token: all axes are alike
        assert of_heads == 2
    queries = Shape(split, strides(*split), 2)
    turned = (width, tokens, heads, 1)
    assert tokens_of("PERMUTE", turned, strides(*turned), (0, 2, 1, 3), [queries]) == 1
    turned_queries = Shape(turned, strides(*turned), 1)
    scores = (256, tokens, heads, 1)
    cache = Shape((width, 256, heads, 1), strides(width, 256, heads, 1))
    assert tokens_of("MUL_MAT", scores, strides(*scores), none, [cache, turned_queries]) == 1
    assert tokens_of("FLASH_ATTN_EXT", split, strides(*split), none, [turned_queries]) == 2
    merged = tokens_of("RESHAPE", hidden.ne, hidden.nb, none, [queries])
    assert merged == 1 or (tokens == 1 and heads == 1)


@given(st.integers(1, 5), st.integers(2, 4), st.integers(5, 7))
def test_tokens_are_followed_through_experts(tokens: int, used: int, width: int) -> None:
    experts, none = 4, (0,) * 16
    hidden = Shape((width, tokens, 1, 1), strides(width, tokens, 1, 1), tokens=1)
    scores = Shape((experts, tokens, 1, 1), strides(experts, tokens, 1, 1), 1)
    best = (used, tokens, 1, 1)  # a view keeps the strides of what was sorted
    assert tokens_of("VIEW", best, scores.nb, none, [scores]) == 1
    apart = (1, experts, tokens, 1)
    assert tokens_of("RESHAPE", apart, strides(*apart), none, [scores]) == 2
    lone = Shape((width, 1, tokens, 1), strides(width, 1, tokens, 1), 2)
    assert tokens_of("RESHAPE", lone.ne, lone.nb, none, [hidden]) in (1, 2)
    each = Shape((width, used, tokens, 1), strides(width, used, tokens, 1), 2)
    assert tokens_of("MUL_MAT_ID", each.ne, each.nb, none, [None, lone]) == 2
    of_one = (width, tokens, 1, 1)
    places = (4, each.nb[2], each.nb[2] * tokens, each.nb[2] * tokens)
    assert tokens_of("VIEW", of_one, places, none, [each]) == 1


def test_what_is_made_of_the_cache_alone_has_no_tokens() -> None:
    assert tokens_of("CPY", (4, 4, 1, 1), strides(4, 4, 1, 1), (0,) * 16, [None]) is None


@given(st.integers(0, 3), st.tuples(*[st.integers(1, 3)] * 4))
def test_tokens_come_first_and_every_value_stays(axis: int, ne: tuple[int, ...]) -> None:
    values = torch.arange(int(np.prod(ne))).reshape(ne[::-1])
    found = tokens_first(values, axis)
    assert found.shape[0] == ne[axis]
    expected = values.movedim(3 - axis, 0).reshape(ne[axis], -1)
    assert torch.equal(found.reshape(ne[axis], -1), expected)


# -- modules --------------------------------------------------------------------------------------


def graph(*nodes: tuple[str, str, tuple[str, ...]]) -> Graph:
    """Make a graph of nodes, each made of the one before: name, operation and weights."""
    keys, found = Keys(), list[GraphNode]()
    for name, op, weights in nodes:
        before = (found[-1].key,) if found else ()
        shapes = {weight: [2, 2] for weight in weights}
        found.append(GraphNode(keys.next(name, op, weights), before, shapes))
    return Graph(found)


def test_modules_are_named_by_the_weights_that_they_own() -> None:
    found = graph(
        ("embd", "GET_ROWS", ("token_embd.weight",)),
        ("norm-0", "RMS_NORM", ()),
        ("attn_norm-0", "MUL", ("blk.0.attn_norm.weight",)),
        ("Qcur-0", "MUL_MAT", ("blk.0.attn_q.weight",)),
        ("Qcur-0", "ADD", ("blk.0.attn_q.bias",)),
        ("Qcur-0", "ROPE", ()),
        ("node_31", "MUL_MAT", ("blk.0.attn_output.weight",)),
        ("node_32", "ADD", ()),
        ("norm", "RMS_NORM", ()),
        ("result_norm", "MUL", ("output_norm.weight",)),
    )
    assert [node.module for node in found.nodes.values()] == [
        "token_embd", "blk.0.attn_norm", "blk.0.attn_norm", "blk.0.attn_q", "blk.0.attn_q",
        "blk.0", "blk.0.attn_output", "blk.0", "output_norm", "output_norm",
    ]  # fmt: skip
    nodes = found.topology("llama", "")
    assert [(node.path, node.type) for node in nodes[:5]] == [
        ("", "llama"), ("token_embd", "Ggml.GetRows"), ("blk", "ModuleList"), ("blk.0", "Block"),
        ("blk.0.attn_norm", "Ggml.RmsNorm"),
    ]  # fmt: skip
    for node in nodes[1:]:
        assert node.path.startswith(nodes[node.parent].path)


def test_a_view_has_values_of_its_own_if_it_keeps_the_best_of_what_was_sorted() -> None:
    assert has_values("VIEW", ["ARGSORT"])
    assert not has_values("VIEW", ["MUL_MAT"])
    assert not has_values("RESHAPE", ["ARGSORT"])
    assert has_values("ARGSORT", ["SOFT_MAX"])


def test_nodes_of_one_name_are_told_by_operation_and_order() -> None:
    keys = Keys()
    found = [keys.next("Qcur-0", op, ()) for op in ("MUL_MAT", "ROPE", "ROPE")]
    assert found == [
        NodeKey("Qcur-0", "MUL_MAT", 0), NodeKey("Qcur-0", "ROPE", 0), NodeKey("Qcur-0", "ROPE", 1)
    ]  # fmt: skip
    assert keys.next("node_7", "MUL_MAT", ("output.weight",)).name == "output.weight"


# -- texts ----------------------------------------------------------------------------------------


def test_a_sequence_that_goes_back_is_another_text_whose_prefix_was_cached() -> None:
    texts = Texts({})
    first = texts.rows(0, [BatchRow(7, 0, 0), BatchRow(8, 1, 0), BatchRow(5, 0, 1)])
    assert [(r.request, r.position, r.row) for r in first] == [
        ("0", 0, 0),
        ("0", 1, 1),
        ("1", 0, 2),
    ]
    again = texts.rows(1, [BatchRow(9, 1, 0), BatchRow(6, 1, 1)])
    assert [(r.request, r.position, r.token, r.row) for r in again] == [
        ("2", 0, 7, None), ("2", 1, 9, 0), ("1", 1, 6, 1)
    ]  # fmt: skip


def test_what_lay_in_the_cache_before_the_recording_is_told() -> None:
    rows = Texts({0: [4, 5, 6]}).rows(0, [BatchRow(1, 2, 0)])
    assert [(r.position, r.token, r.row) for r in rows] == [(0, 4, None), (1, 5, None), (2, 1, 0)]


def test_the_prompt_of_a_text_is_what_its_first_batch_has() -> None:
    batch = [BatchRow(at, at, 0) for at in range(5)] + [BatchRow(9, 0, 1)]
    rows = Texts({}).rows(0, batch[:3])
    assert parts_of(rows, batch[:3], batch[3:]) == [Part("0", 0, 3, 5)]


def test_the_part_of_a_text_begins_behind_what_the_cache_has() -> None:
    batch = [BatchRow(1, 2, 0), BatchRow(2, 3, 0)]
    rows = Texts({0: [4, 5, 6]}).rows(0, batch)
    assert parts_of(rows, batch, []) == [Part("0", 2, 2, 4)]
