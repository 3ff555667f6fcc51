"""The texts of an engine that names no requests: they are told by sequence and position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmdebug_nb.capture.compat.llamacpp_api import BatchRow
from llmdebug_nb.capture.request_filter import Part
from llmdebug_nb.core.records import TokenRow


@dataclass
class _Text:
    request: str
    next: int
    tokens: dict[int, int | None] = field(default_factory=dict)


class Texts:
    """Tells texts: one begins where a sequence goes back, or begins. Requests are numbered from 0.

    What it keeps of the text before comes from the cache: it has no row.
    """

    def __init__(self, past: Mapping[int, Sequence[int]]) -> None:
        """``past``: the tokens by sequence that are in the cache already."""
        self._count = 0
        self._now: dict[int, _Text] = {}
        self._past = {sequence: dict(enumerate(tokens)) for sequence, tokens in past.items()}

    def rows(self, root_call: int, computed: Sequence[BatchRow]) -> list[TokenRow]:
        """Return the rows of a step, and those that its new texts find in the cache."""
        rows = []
        for row, each in enumerate(computed):
            text = self._now.get(each.sequence)
            if text is None or each.position < text.next:
                text = self._begun(each, text)
                rows += [
                    TokenRow(root_call, None, text.request, position, token)
                    for position, token in sorted(text.tokens.items())
                ]
            text.tokens[each.position] = each.token
            text.next = each.position + 1
            rows.append(TokenRow(root_call, row, text.request, each.position, each.token, 0, None))
        return rows

    def _begun(self, first: BatchRow, before: _Text | None) -> _Text:
        known = before.tokens if before is not None else self._past.get(first.sequence, {})
        kept = {position: token for position, token in known.items() if position < first.position}
        text = self._now[first.sequence] = _Text(str(self._count), first.position, kept)
        self._count += 1
        return text


def parts_of(
    rows: Sequence[TokenRow], computed: Sequence[BatchRow], behind: Sequence[BatchRow]
) -> list[Part]:
    """Return what a step computes of each request.

    ``rows``: of the step, as `Texts.rows` gives them. ``computed``: its tokens, in their order.
    ``behind``: those that follow in the same batch. A text's prompt is what its first batch has.
    """
    parts: dict[str, Part] = {}
    for each in rows:
        if each.row is None:
            continue
        known = parts.get(each.request)
        if known is None:
            sequence = computed[each.row].sequence
            following = sum(one.sequence == sequence for one in behind)
            known = Part(each.request, each.position, 0, each.position + following)
        tokens, prompt = known.tokens + 1, (known.prompt or 0) + 1
        parts[each.request] = known._replace(tokens=tokens, prompt=prompt)
    return list(parts.values())
