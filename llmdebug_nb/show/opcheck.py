"""The result of checking operators: rows for tables, text for terminals, a page for notebooks."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.replay.checks import RIGHT, WRONG, CallCheck, OpCheckResult, OutputCheck, TypeCount
from llmdebug_nb.show.html_table import html_table
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.words import count_text

_SHOWN = 5  # wrong calls in full, and reasons by their most frequent details
TYPES = 12  # types of operators
_UPSTREAM = [
    "op_id", "op_name", "op_param", "tensor_path", "out_tensor_id", "precision_standard",
    "precision_result", "rel_precision_rate(%)", "max_rel_error",
]  # fmt: skip
# columns of upstream that `-metric` adds
_ADDED = {
    "abs": {"abs_precision_rate(%)": "abs_rate", "max_abs_error": "max_abs"},
    "cos_sim": {"cosine_similarity": "cosine"},
    "kl": {"kl_divergence": "kl"},
}
_OURS = [
    "verdict", "rounding_units", "rel_l2_error", "not_checked", "rerun", "phase", "generation",
    "step", "call", "rank", "dtype", "shape",
]  # fmt: skip
HEAD = ("operator", "calls", "checked", "wrong", "below standard", "error / rounding")
Cell = str | int | float | None


def columns(result: OpCheckResult) -> list[str]:
    """Return upstream's columns, with those of the metrics that were asked for, then ours."""
    return [
        *_UPSTREAM,
        *(name for added in _added(result) for name in added),
        *(f"alg:{name}" for name in _own(result)),  # columns that no other has
        "fail_reason",
        *_OURS,
    ]


def rows(result: OpCheckResult, failed: bool = False) -> list[dict[str, Cell]]:
    """Return a row for each output, or for a call that was not checked.

    ``failed``: only what is wrong or below upstream's standard.
    """
    found = []
    for call in result.calls:
        for output in call.outputs or (None,):
            bad = output is not None and (output.why or output.meets is False)
            if bad or not failed:
                found.append(_row(result, call, output))
    return found


def _added(result: OpCheckResult) -> list[dict[str, str]]:
    wanted = result.options.get("metrics")
    names = wanted if isinstance(wanted, (list, tuple)) else ()
    return [added for name, added in _ADDED.items() if name in names]


def _own(result: OpCheckResult) -> list[str]:
    """Return the names of the user's comparisons."""
    names = result.options.get("own")
    return [str(name) for name in names] if isinstance(names, (list, tuple)) else []


def _row(result: OpCheckResult, call: CallCheck, output: OutputCheck | None) -> dict[str, Cell]:
    key = call.key
    upstream: list[Cell] = [call.id, call.op, call.parameters, call.tensors]
    if output is None:
        upstream += [None, None, None, None, None]
    else:
        met = {True: "pass", False: "failed", None: None}[output.meets]
        upstream += [output.slot, output.standard, met, output.rate, output.max_rel]
    added: list[Cell] = [
        getattr(output, name, None) for each in _added(result) for name in each.values()
    ]
    numbers = {} if output is None else {name: number for name, number, _ in output.own}
    added += [numbers.get(name) for name in _own(result)]
    verdict = call.verdict if output is None else WRONG if output.why else RIGHT
    ours: list[Cell] = [verdict]
    ours += [None, None] if output is None else [output.error, output.l2]
    ours += [call.reason or None, call.again or None]
    ours += [key.phase, key.generation, key.step, key.call, key.rank]
    ours += [None, None] if output is None else [output.dtype, "x".join(map(str, output.shape))]
    why = call.detail if output is None else _failed(output)
    return dict(zip(columns(result), [*upstream, *added, why or None, *ours], strict=True))


def _failed(output: OutputCheck) -> str:
    """Return why an output failed; one that only misses upstream's standard is none of ours."""
    why = output.why
    if not why and output.meets is False:
        why = "below upstream's standard; rounding explains it"
    return "; ".join([why] * bool(why) + [said for _, _, said in output.own if said])


# -- text ------------------------------------------------------------------------------------------


def text(result: OpCheckResult, paths: Sequence[Path] = ()) -> str:
    """Return the verdict, the wrong calls, operators by type, and what was not checked."""
    return printable_lines([*_head(result), "", *_table(result), *_tail(result, paths)])


def page(result: OpCheckResult, paths: Sequence[Path] = ()) -> str:
    """Return the same for a notebook."""
    heads, tails = map(html.escape, around(result, paths))
    table = html_table(HEAD, map(cells, result.types()[:TYPES]), range(1, len(HEAD)))
    return f"<pre>{heads}</pre>{table}<pre>{tails}</pre>"


def around(result: OpCheckResult, paths: Sequence[Path] = ()) -> tuple[str, str]:
    """Return what stands above the table, and below it."""
    return printable_lines(_head(result)), printable_lines(_tail(result, paths))


def _head(result: OpCheckResult) -> Iterator[str]:
    counts = f"{result.checked:,} of {count_text(result.total, 'operator call')} checked"
    yield f"opcheck {result.name}: {result.verdict}: {len(result.wrong):,} wrong; {counts}"
    if not result.total:
        yield "it has no call with an output: record a model with mode='aten' or 'api'"
    dtype, threads = result.options.get("dtype", "float64"), result.options.get("threads")
    count = f", {count_text(threads, 'thread')}" if isinstance(threads, int) and threads else ""
    if dtype != "float64" or count:
        kind = "the dtype of the call" if dtype == "own" else str(dtype)
        yield f"reference: in {kind}{count}"
    if not result.complete:
        yield f"interrupted: {result.total - len(result.calls):,} calls are left"
    for call in result.wrong[:_SHOWN]:
        yield from wrong_lines(call)
    if len(result.wrong) > _SHOWN:
        yield f"… {len(result.wrong) - _SHOWN:,} more wrong calls"


def wrong_lines(call: CallCheck) -> Iterator[str]:
    """Yield where a wrong call is, and what is wrong."""
    key, worst = call.key, call.worst
    phase = "" if key.phase == "forward" else f" {key.phase}"
    yield f"→ {key.path}{phase} step {key.step} call {key.call}" + f" [{call.id}]" * bool(call.id)
    if worst is not None:
        yield f"    output {worst.slot} ({worst.dtype} {list(worst.shape)}): {worst.why}"
    if call.again:
        yield f"    {call.again}"


def _table(result: OpCheckResult) -> list[str]:
    types = result.types()
    lines = aligned(HEAD, [cells(each) for each in types[:TYPES]])
    if len(types) > TYPES:
        lines.append(f"… {len(types) - TYPES} more types")
    return lines


def cells(each: TypeCount) -> list[str]:
    """Return the cells of a type, in the order of `HEAD`."""
    digits = 2 if each.error < 100 else 0
    error = "∞" if math.isinf(each.error) else f"{each.error:,.{digits}f}"
    error = error if each.checked else ""
    counts = (each.calls, each.checked, each.wrong, each.below_standard)
    return [printable(each.op), *(f"{count:,}" for count in counts), error]


def _tail(result: OpCheckResult, paths: Sequence[Path]) -> Iterator[str]:
    if result.below_standard:
        yield (
            f"below upstream's standard, but explained by rounding:"
            f" {count_text(result.below_standard, 'call')}"
        )
    for reason, count in result.not_checked.items():
        details: dict[str, int] = {}
        for call in result.calls:
            if call.reason == reason:
                details[call.detail] = details.get(call.detail, 0) + 1
        often = sorted(details, key=lambda detail: -details[detail])[:_SHOWN]
        yield f"not checked: {reason}: {count_text(count, 'call')}: {'; '.join(often)}"
    if result.absent:
        rows, first = count_text(len(result.absent), "row"), "; ".join(result.absent[:_SHOWN])
        yield f"not found: {rows} of the csv of cases, which name no call of this run: {first}"
    yield from result.notes
    yield from (f"written: {os.path.relpath(path)}" for path in paths)
