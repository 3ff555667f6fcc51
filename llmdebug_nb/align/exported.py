"""Match an exported graph (ONNX, for one) with the model it comes from, if names do not help.

An exporter may drop the names of modules, and an optimiser may fuse operators of several modules.
The order of results remains: results of modules and operators in the model, results of nodes in
the graph. They are aligned by value or, if the values differ, by kind of operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from llmdebug_nb.align import sequence
from llmdebug_nb.align.calls import RecordedCall
from llmdebug_nb.align.reasons import Reason, Why
from llmdebug_nb.align.sequence import CallFeatures, MatchTolerance
from llmdebug_nb.core.identity import telling_bytes
from llmdebug_nb.core.records import EXPORTED, Record

# classes of modules and types of nodes that compute the same; any other matches by value alone
_KINDS = {
    "matmul": "Linear Conv1D MatMul Gemm FusedMatMul FusedGemm MatMulInteger MatMulNBits",
    "lookup": "Embedding Gather",
    "norm": "LayerNorm LayerNormalization MVN",
    "convolution": "Conv1d Conv2d Conv3d Conv FusedConv Convolution",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def is_graph(records: Iterable[Record]) -> bool:
    """Tell whether a run is of an exported graph: its operators are nodes."""
    return any(op.startswith(EXPORTED) for op in {record.op for record in records})


def match_results(
    golden: Sequence[RecordedCall],
    mine: Sequence[RecordedCall],
    tolerance: MatchTolerance,
    nameless: bool,
) -> Iterator[tuple[RecordedCall, RecordedCall, Why, bool]]:
    """Yield unpaired calls whose results match, in the order of both, with the reason.

    ``nameless``: the graph does not name its modules. Then the kind of operation decides if the
    values differ.
    """
    golden, mine = _distinct_results(golden), _distinct_results(mine)
    sides = [
        [_features(call, side, nameless) for call in calls]
        for side, calls in (("golden", golden), ("mine", mine))
    ]
    for i, j in sequence.align(sides[0], sides[1], tolerance):
        left, right = golden[i].output, mine[j].output
        if left is None or right is None:
            continue
        same_kind = sides[0][i].op == sides[1][j].op
        if sequence.agreement(left, right) >= tolerance.sure_digits:
            yield golden[i], mine[j], Why(Reason.SAME_RESULT), same_kind
        elif same_kind and left.shape == right.shape:
            yield golden[i], mine[j], Why(Reason.SAME_KIND), same_kind


def _distinct_results(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls in the order of their results; of calls with equal results, the first.

    A module begins before the calls inside it and ends after them, so its result may be theirs.
    """
    outputs = [call.first_output for call in calls]
    order = sorted((output.seq, at) for at, output in enumerate(outputs) if output is not None)
    first: dict[object, RecordedCall] = {}
    for _, at in order:
        summary = calls[at].output
        assert summary is not None
        key = (summary.fingerprint, summary.shape) if summary.fingerprint else at
        first.setdefault(key, calls[at])
    return list(first.values())


def match_copies(
    calls: Sequence[RecordedCall],
    paired_ids: Collection[int],
    pairs: Iterable[tuple[Record, Record]],
) -> Iterator[tuple[Record, Record, Why]]:
    """Yield unpaired records of modules that equal a paired record, with that record's partner.

    ``paired_ids``: ids of records with a partner. ``pairs``: this side's record first.
    """
    known: dict[object, tuple[Record, Record]] = {}
    for own, other in pairs:
        known.setdefault((own.summary.fingerprint, own.summary.shape), (own, other))
    records = (r for call in calls if not call.operator for r in call.records)
    for record in [r for r in records if r.id not in paired_ids and telling_bytes(r.summary)]:
        pair = known.get((record.summary.fingerprint, record.summary.shape))
        if pair is not None:
            s = pair[0].site
            where = f": it is {s.role}[{s.slot}] of {s.path or 'the root'}"
            yield record, pair[1], Why(Reason.HANDED_ON, where)


def _features(call: RecordedCall, side: str, nameless: bool) -> CallFeatures:
    by_kind = nameless and call.operator == call.op.startswith(EXPORTED)
    kind = _KIND_OF.get(call.op.rpartition(".")[2]) if by_kind else None
    shape = call.output.shape if call.output is not None else ()
    return CallFeatures(kind or f"{side}'s {call.op}", shape, value=call.output)
