"""The result of a comparison of logits: rows for tables, and text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from llmdebug_nb.comparison.token_checks import RULES, LogitsResult, TokenCheck
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.printable import printable, printable_lines
from llmdebug_nb.show.tables import aligned
from llmdebug_nb.show.words import count_text

if TYPE_CHECKING:
    from llmdebug_nb.show.tokens import Tokenizer

Cell = str | int | float | bool | None
Words = Callable[[int], str]  # a token id -> its text
_SHOWN = 8  # tokens in a printed table
_SIDE = 24  # tokens side by side, around the first that differs
_WIDTH = 14  # characters of a token in a table
# msit's columns of `compare -cl logits`
COLUMNS = [
    "file_name", "key", "token_id", "cosine_similarity", "kl_divergence", "l1_norm",
    "ulp_max_diff", "ulp", "passed", "cmp_fail_reason",
    "generation", "row", "token", "token_text", "golden_best", "mine_best", "flipped", "rank",
    "golden_probability", "mine_probability", "margin", "top_k_lost", "relative_l2_error",
    "request", "sampled", "golden_logprob", "mine_logprob", "importance_ratio",
]  # fmt: skip
BY_REQUEST = [
    "request", "tokens", "mean_ratio", "least_ratio", "largest_ratio", "clipped", "mean_kl",
    "worst_step",
]  # fmt: skip


def words(tokenizer: Tokenizer | None) -> Words:
    """Return what names a token: its text, or its id where no tokenizer is known."""
    if tokenizer is None:
        return str

    def word(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except Exception as error:
            raise OptionError(
                f"tokenizer: {type(tokenizer).__name__} can't decode the id {token}"
                f" ({type(error).__name__}: {error})"
            ) from None

    return word


def rows(result: LogitsResult, word: Words) -> list[dict[str, Cell]]:
    """Return a row for each token, in the order of `COLUMNS`."""
    return [dict(zip(COLUMNS, _row(result, each, word), strict=True)) for each in result.tokens]


def _row(result: LogitsResult, each: TokenCheck, word: Words) -> list[Cell]:
    m = each.metrics
    return [
        result.sides[0].place, each.sequence, each.step, m["cosine_similarity"], each.kl,
        m["l1_norm"], m["max_gap"], m["ulp"], each.passed,
        None if each.passed else each.why,
        each.generation, each.row, each.token, word(each.token), *each.best, each.flipped,
        each.rank, *each.probability, each.margin, each.lost, m["relative_euclidean_distance"],
        request(result, each) if result.requests else None, each.sampled, *each.logprob, each.ratio,
    ]  # fmt: skip


# -- text ------------------------------------------------------------------------------------------


def text(result: LogitsResult, word: Words) -> str:
    """Return verdict, first token that differs, texts side by side, the worst tokens, and notes."""
    lines = [*head(result, word)]
    if result.tokens:
        columns, cells, more = worst(result, word)
        lines += ["", *_side_by_side(result, word), "", *aligned(columns, cells)]
        lines += [more] if more else []
    return printable_lines([*lines, *tail(result)])


def head(result: LogitsResult, word: Words) -> Iterator[str]:
    """Yield the verdict, what was compared, and the first token that differs."""
    golden, mine = result.sides
    count = f"{len(result.tokens):,} of {count_text(result.total, 'token')} compared"
    failed, flips = len(result.failed), len(result.flips)
    yield (
        f"logits: {result.verdict}: {failed:,} beyond the rule, {flips:,} with another most"
        f" likely token; {count}"
    )
    rule = RULES.get(result.rule, "")
    yield f"rule {result.rule}{f': {rule}' if rule else ''}"
    yield f"golden: {golden.name}, {golden.place}; mine: {mine.name}, {mine.place}"
    first = result.first_flip
    if first is not None:
        yield f"first token that differs: {where(result, first)}: {choice(first, word)}"
    elif result.tokens:
        yield "no token differs"
    known = [each for each in result.tokens if each.kl is not None]
    if known:
        most = max(known, key=lambda each: _size(each.kl))
        yield f"largest KL: {most.kl:.3g} nats, at {where(result, most)}"
    yield from _mismatch(result)


def _mismatch(result: LogitsResult) -> Iterator[str]:
    """Yield how far apart the probabilities of sampled tokens are."""
    found = result.mismatch
    if found is None:
        return
    mean, least, largest = found.ratio
    low, high = 1 - result.clip, 1 + result.clip
    yield (
        f"importance ratio (golden / mine) of {count_text(found.tokens, 'sampled token')}: mean"
        f" {mean:.6g}, {least:.6g} to {largest:.6g}, {found.clipped:,} outside {low:g} to {high:g};"
        f" mean KL {found.kl:.3g} nats"
    )
    several = result.by_sequence()
    if len(several) > 1:
        first, most = max(several, key=lambda one: (one[1].clipped / one[1].tokens, one[1].kl))
        name = "request" if result.requests else "sequence"
        yield (
            f"farthest apart: {name} {printable(request(result, first))}: {most.clipped:,} of"
            f" {count_text(most.tokens, 'ratio')} outside, mean KL {most.kl:.3g} nats, worst at"
            f" {where(result, most.worst)} ({most.worst.ratio:.6g})"
        )


def by_request(result: LogitsResult) -> list[list[Cell]]:
    """Return a row for each sequence with sampled tokens, in the order of `BY_REQUEST`."""
    return [
        [request(result, first), one.tokens, *one.ratio, one.clipped / one.tokens, one.kl,
         one.worst.step]
        for first, one in result.by_sequence()
    ]  # fmt: skip


def choice(each: TokenCheck, word: Words) -> str:
    """Return what both prefer, and how clearly."""
    golden, mine = (f"{word(token)!r}" for token in each.best)
    return (
        f"golden {golden}, mine {mine}; golden prefers its own by {each.margin:.4g}"
        f" ({'within' if each.passed else 'beyond'} the rule)"
    )


def request(result: LogitsResult, each: TokenCheck) -> str:
    """Return what names the sequence of a token: a request, or generation and sequence."""
    if each.generation < len(result.requests):
        return result.requests[each.generation]
    return f"{each.generation}.{each.sequence}"


def where(result: LogitsResult, each: TokenCheck) -> str:
    """Return the place of a token."""
    if result.requests:
        return f"position {each.step} of request {printable(request(result, each))}"
    return (
        f"step {each.step}"
        + f" of generation {each.generation}" * bool(each.generation)
        + f", sequence {each.sequence}" * bool(each.sequence)
        + f", row {each.row}" * bool(each.row)
    )


def _side_by_side(result: LogitsResult, word: Words) -> list[str]:
    """Return the most likely tokens of both in one sequence, around the first that differs."""
    about = result.first_flip or result.tokens[0]
    sequence = [
        each
        for each in result.tokens
        if (each.generation, each.sequence) == (about.generation, about.sequence)
    ]
    at = max(0, sequence.index(about) - _SIDE // 2)
    part = sequence[at : at + _SIDE]
    before, after = ["…"] * (at > 0), ["…"] * (at + _SIDE < len(sequence))
    sides = [[printable(word(each.best[side])) for each in part] for side in (0, 1)]
    golden, mine = (
        [name, *before, *cells, *after]
        for name, cells in zip(("golden", "mine"), sides, strict=True)
    )
    marks = ["^" * len(other) * each.flipped for other, each in zip(sides[1], part, strict=True)]
    under = ["", *(" " for _ in before), *marks, *("" for _ in after)]
    return aligned(golden, [mine, under] if any(marks) else [mine])


def worst(result: LogitsResult, word: Words) -> tuple[list[str], list[list[str]], str]:
    """Return head and rows of the tokens with the largest divergence, and how many more there are.

    Those that fail come first.
    """
    found = sorted(result.tokens, key=lambda each: (each.passed, -_size(each.kl)))[:_SHOWN]
    columns = ["", "token", "KL", "cosine", "l1", "ulp", "rank", "p golden", "p mine",
               f"lost of top {result.top}", "where"]  # fmt: skip
    left = len(result.tokens) - len(found)
    more = f"… {left:,} more tokens: to_pandas(), --csv" if left else ""
    return columns, [_cells(result, each, word) for each in found], more


def _size(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _cells(result: LogitsResult, each: TokenCheck, word: Words) -> list[str]:
    mark = ("✓" if each.passed else "✗") + "≠" * each.flipped
    m = each.metrics
    figures = (each.kl, m["cosine_similarity"], m["l1_norm"], m.get("max_gap_ulp"))
    formats = ("{:.3g}", "{:.6f}", "{:+.2e}", "{:.3g}")
    shown = [
        "" if value is None else form.format(value)
        for value, form in zip(figures, formats, strict=True)
    ]
    rank = "" if each.rank is None else str(each.rank)
    p = [f"{x:.3g}" for x in each.probability]
    token = printable(word(each.token))[:_WIDTH]
    return [mark, token, *shown, rank, *p, str(each.lost), where(result, each)]


def tail(result: LogitsResult) -> Iterator[str]:
    """Yield what was not compared, and the notes."""
    for why, count in result.left_out.items():
        yield f"not compared: {why}: {count_text(count, 'token')}"
    yield from result.notes
