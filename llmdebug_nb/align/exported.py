"""An exported graph (ONNX) and the model that it was made of: what answers to each other where names do not say it.

Exporters may leave no names of modules, and optimisers fuse across modules. What is left then are the results in the order in which they were computed:
those of modules and operators on one side, those of nodes on the other, aligned by their values, and where these differ, by what computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from llmdebug_nb.align import sequence
from llmdebug_nb.align.calls import Call, telling
from llmdebug_nb.align.sequence import Leeway, Token
from llmdebug_nb.core.records import EXPORTED, Record

SAME_RESULT = "same result in the order of both"
SAME_KIND = "same kind of operation in the order of both"
HANDED_ON = "the same tensor as one that is paired"
# what of a graph computes what a module is for; anything else is told by its values alone
_KINDS = {
    "matmul": (
        "Linear",
        "Conv1D",
        "MatMul",
        "Gemm",
        "FusedMatMul",
        "FusedGemm",
        "MatMulInteger",
        "MatMulNBits",
    ),
    "lookup": ("Embedding", "Gather"),
    "norm": ("LayerNorm", "LayerNormalization"),
    "convolution": ("Conv1d", "Conv2d", "Conv3d", "Conv", "FusedConv"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def is_graph(records: Iterable[Record]) -> bool:
    """Tell whether a run is of an exported graph: operators that it recorded are nodes."""
    return any(record.op.startswith(EXPORTED) for record in records)


def by_result(
    golden: Sequence[Call], mine: Sequence[Call], leeway: Leeway, nameless: bool
) -> Iterator[tuple[Call, Call, str, bool]]:
    """Yield calls without a partner whose results answer to each other, in the order of both, and whether they are of one kind.

    ``nameless``: the graph does not say of which modules it is, so the kind of operation has to, where values differ.
    """
    golden, mine = _in_order(golden), _in_order(mine)
    sides = [
        [_token(call, which, nameless) for call in calls]
        for which, calls in (("golden", golden), ("mine", mine))
    ]
    for i, j in sequence.align(sides[0], sides[1], leeway):
        left, right = golden[i].output, mine[j].output
        alike = sides[0][i].op == sides[1][j].op
        if (
            left is not None
            and right is not None
            and sequence.agreement(left, right) >= leeway.sure
        ):
            yield golden[i], mine[j], SAME_RESULT, alike
        elif alike and left is not None and right is not None and left.shape == right.shape:
            yield golden[i], mine[j], SAME_KIND, alike


def _in_order(calls: Sequence[Call]) -> list[Call]:
    """Return calls as their results were made, and of those with the same one the first: a module begins before what it holds, and ends after it."""
    made = sorted((call.made.seq, at) for at, call in enumerate(calls) if call.made is not None)
    found: dict[object, Call] = {}
    for _, at in made:
        summary = calls[at].output
        assert summary is not None
        found.setdefault(
            (summary.fingerprint, summary.shape) if summary.fingerprint else at, calls[at]
        )
    return list(found.values())


def handed_on(
    calls: Sequence[Call], done: Collection[int], pairs: Iterable[tuple[Record, Record]]
) -> Iterator[tuple[Record, Record, str]]:
    """Yield records of modules without a partner that are the same tensor as one that is paired, with the partner of that.

    ``pairs``: what is paired, this side first. ``done``: the ids of records that are.
    """
    known: dict[object, tuple[Record, Record]] = {}
    for own, other in pairs:
        known.setdefault((own.summary.fingerprint, own.summary.shape), (own, other))
    for record in [
        r
        for call in calls
        if not call.operator
        for r in call.records
        if r.id not in done and telling(r)
    ]:
        found = known.get((record.summary.fingerprint, record.summary.shape))
        if found is not None:
            s = found[0].site
            yield (
                record,
                found[1],
                f"{HANDED_ON}: it is {s.role}[{s.slot}] of {s.path or 'the root'}",
            )


def _token(call: Call, side: str, nameless: bool) -> Token:
    named = nameless and call.operator == call.op.startswith(EXPORTED)
    kind = _KIND_OF.get(call.op.removeprefix(EXPORTED)) if named else None
    return Token(
        kind or f"{side}'s {call.op}",
        call.output.shape if call.output is not None else (),
        value=call.output,
    )
