"""What the axes of a tensor are: tokens, heads, channels; from shapes and plain attributes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from llmdebug_nb.core.paths import module_of, parent_of
from llmdebug_nb.core.records import CallKey, Record
from llmdebug_nb.graph.flow import Flow
from llmdebug_nb.graph.flow_calls import FlowCall
from llmdebug_nb.relation.evidence import TOKENS
from llmdebug_nb.replay.runs import Side

_INTEGER = re.compile(r"\d{1,6}")
_OF_HEADS = re.compile(r"heads?(_|\b)")  # n_head, num_key_value_heads, head_dim
_SIZE = re.compile(r"dim|size")


def head_counts(side: Side, flow: Flow, key: CallKey, shape: Sequence[int]) -> set[int]:
    """Return numbers of heads that may divide an axis of a tensor of a call.

    A module's attributes tell: those that speak of heads. So do its tensors: one of [..., heads,
    ..., size] beside one whose last axis is heads * size.
    """
    found = _of_attributes(side, module_of(key.path), shape)
    holder, tokens = _holder(flow, key), _tokens(flow, key)
    shapes = {r.summary.shape for r in _inside(holder)} if holder is not None else set()
    widths = {each[-1] for each in shapes if 2 <= len(each) <= 3}
    for each in shapes:
        if len(each) >= 4:
            found |= {n for n in each[1:-1] if n * each[-1] in widths and n != tokens}
    # heads of size 0 have none; the last axis holds channels or keys
    found -= {0, 1, shape[-1] if shape else 1}
    return {count for count in found if any(size % count == 0 for size in shape)}


def axis_words(
    flow: Flow, key: CallKey, shape: Sequence[int], heads: Sequence[int]
) -> tuple[str, ...]:
    """Return words for the axes of a tensor of a call; none where they are not known."""
    tokens = _tokens(flow, key)
    words = [f"axis {axis}" for axis in range(len(shape))]
    if tokens < 2 or shape.count(tokens) not in (1, 2) or not 2 <= len(shape) <= 4:
        return ()
    if shape.count(tokens) == 2:
        if tuple(shape[-2:]) != (tokens, tokens):
            return ()
        words[-2:] = "the queries", "the keys"
    else:
        at = shape.index(tokens)
        words[at] = TOKENS
        if at < len(shape) - 1:
            words[-1] = "the channels"
    for axis in range(1, len(shape) - 1):
        if len(shape) == 4 and words[axis].startswith("axis") and shape[axis] in heads:
            words[axis] = "the heads"
    return tuple(words)


def _of_attributes(side: Side, path: str, shape: Sequence[int]) -> set[int]:
    """Return what the attributes of a module, and of the one around it, say of heads."""
    found: set[int] = set()
    for module in dict.fromkeys((path, parent_of(path))):
        for name, (kind, text) in side.attributes.get(module, {}).items():
            if kind != "int" or text is None or not _INTEGER.fullmatch(text):
                continue
            if not _OF_HEADS.search(name) or int(text) < 1:
                continue
            if _SIZE.search(name):
                found |= {size // int(text) for size in shape if size % int(text) == 0}
            else:
                found.add(int(text))
    return found


def _holder(flow: Flow, key: CallKey) -> FlowCall | None:
    """Return the call of the module whose tensors tell of a call's: the one around it."""
    call = flow.calls.get(key)
    while call is not None and (call.is_operator or not _deep(call)):
        call = call.around
    return call


def _deep(call: FlowCall) -> bool:
    """Tell whether a call has a tensor of four axes in it."""
    return any(len(record.summary.shape) >= 4 for record in _inside(call))


def _inside(call: FlowCall) -> Iterator[Record]:
    yield from call.records_of
    for inner in call.inner:
        yield from inner.records_of


def _tokens(flow: Flow, key: CallKey) -> int:
    """Return how many tokens the outermost call around a call takes, 0 if that is not known."""
    call = flow.calls.get(key)
    while call is not None and call.around is not None:
        call = call.around
    shapes = (r.summary.shape for r in call.inputs) if call is not None else ()
    return next((shape[1] for shape in shapes if len(shape) >= 2), 0)
