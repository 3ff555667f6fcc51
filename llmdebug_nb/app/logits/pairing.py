"""The tokens of two sources of logits, paired and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from llmdebug_nb.app.logits.contexts import SEQUENCES, Contexts
from llmdebug_nb.app.logits.sources import Key, Source, Step
from llmdebug_nb.app.logits.texts import Texts
from llmdebug_nb.comparison import token_rows
from llmdebug_nb.comparison.token_checks import INTERRUPTED, LogitsResult, Side, TokenCheck
from llmdebug_nb.comparison.token_rows import Judge
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.errors import LLMDebugError

ONLY_GOLDEN, ONLY_MINE = "only golden has the step", "only mine has the step"
ROWS = "the numbers of rows differ: only the last ones were compared"
NOT_FINITE = "no logit is finite in both"
_Rows = tuple[torch.Tensor, torch.Tensor]  # of one token, over one vocabulary


class Pairing:
    """Compares two sources; `result` may be asked for at any time."""

    def __init__(
        self, golden: Source, mine: Source, judge: Judge, top: int,
        clip: float, texts: Texts | None = None,
    ) -> None:  # fmt: skip
        """``texts``: the requests that the sources are of, if an engine was recorded."""
        self._golden, self._mine, self._judge, self._top = golden, mine, judge, top
        self._left_out = Counter({} if texts is None else texts.left_out)
        self._clip = clip
        self._requests = () if texts is None else texts.requests
        self._beyond = [0.0, 0.0]  # the largest share of tokens that the other side lacks
        self._widths: set[tuple[int, int]] = set()
        self._contexts = Contexts()
        self._tokens: list[TokenCheck] = []

    def run(self, progress: bool) -> LogitsResult:
        """Compare all steps. After an interrupt, return what is done."""
        golden, mine = self._golden.steps, self._mine.steps
        keys = sorted(golden.keys() | mine.keys())
        bar = progress_bar(keys, desc="logits", unit="step", shown=progress)
        done = 0
        try:
            for key in bar:
                if key not in mine:
                    self._left_out[ONLY_GOLDEN] += _count(golden[key])
                elif key not in golden:
                    self._left_out[ONLY_MINE] += _count(mine[key])
                else:
                    self._step(key, golden[key], mine[key])
                done += 1
        except KeyboardInterrupt:
            left = (golden.get(key) or mine[key] for key in keys[done:])
            self._left_out[INTERRUPTED] += sum(map(_count, left))
        return self.result()

    def result(self) -> LogitsResult:
        sides = tuple(Side(each.name, each.place) for each in (self._golden, self._mine))
        return LogitsResult(
            (sides[0], sides[1]), self._judge.name, self._top, self._clip,
            tuple(self._tokens),
            dict(+self._left_out), tuple(self._all_notes()), self._requests,
        )  # fmt: skip

    def _step(self, key: Key, golden: Step, mine: Step) -> None:
        why = self._why_not(golden, mine)
        if why:
            self._left_out[why] += _count(golden)
            return
        try:
            g, m = golden.load(), mine.load()
        except LLMDebugError as error:
            self._left_out[str(error)] += _count(golden)
            return
        self._contexts.begin(key[0], golden, mine)
        rows = 1 if golden.generating else min(golden.shape[1], mine.shape[1])
        self._left_out[ROWS] += golden.shape[0] * (_rows(golden) - rows)
        for sequence in range(golden.shape[0]):
            for row in range(rows):
                both = g[sequence, row - rows], m[sequence, row - rows]
                self._token(key, golden, both, sequence, row, rows - row - 1)

    def _why_not(self, golden: Step, mine: Step) -> str:
        """Return why no token of a step can be compared, "" if some can."""
        for source, step in ((self._golden, golden), (self._mine, mine)):
            if step.problem:
                return f"{source.name}: {step.problem}"
        return SEQUENCES if golden.shape[0] != mine.shape[0] else ""

    def _token(
        self, key: Key, step: Step, rows: _Rows, sequence: int, row: int, behind: int
    ) -> None:
        generation, number = key
        refusal = self._contexts.refusal(generation, sequence, behind)
        if refusal:
            self._left_out[refusal] += 1
            return
        g, m = self._cut(rows)
        finite = bool((g.isfinite() & m.isfinite()).any())
        if not finite and torch.equal(g.isnan(), m.isnan()):
            self._left_out[NOT_FINITE] += 1
            return
        chosen = self._chosen(key, step, sequence, behind)
        found = token_rows.figures(g, m, chosen, self._top)
        passed, why = self._judge(found, g, m)
        check = TokenCheck(
            generation=generation, step=number, sequence=sequence, row=row,
            token=found.best[0] if chosen is None else chosen, best=found.best, rank=found.rank,
            logprob=found.logprob, margin=found.margin, lost=found.lost,
            metrics=found.metrics, passed=passed, why=why,
            sampled=chosen is not None and step.sampled,
        )  # fmt: skip
        self._tokens.append(check)
        if check.flipped:
            self._contexts.flipped(generation, sequence)

    def _chosen(self, key: Key, step: Step, sequence: int, behind: int) -> int | None:
        """Return the token that golden chose here: what was its input next."""
        if step.following is not None:
            return step.following
        if not step.generating:
            ids = step.ids
            return None if ids is None or not behind else int(ids[sequence, -behind])
        following = self._golden.steps.get((key[0], key[1] + 1))
        if following is None or following.ids is None or sequence >= len(following.ids):
            return None
        return int(following.ids[sequence, 0 if following.cached else -1])

    def _cut(self, rows: _Rows) -> _Rows:
        """Return both rows over the tokens that both have; note what the others would get."""
        widths = len(rows[0]), len(rows[1])
        self._widths.add(widths)
        if widths[0] == widths[1]:
            return rows
        width = min(widths)
        for side, row in enumerate(rows):
            if len(row) > width:
                share = token_rows.share_beyond(row, width)
                self._beyond[side] = max(self._beyond[side], share)
        return rows[0][:width], rows[1][:width]

    def _all_notes(self) -> Iterator[str]:
        yield from (*self._golden.notes, *self._mine.notes)
        if self._contexts.guessed:
            yield (
                f"the inputs of {self._contexts.guessed:,} steps were not recorded in both: the"
                " prompts are taken as equal, and the tokens as the most likely ones"
            )
        for widths in sorted(self._widths):
            if widths[0] != widths[1]:
                share = max(self._beyond)
                yield (
                    f"vocabularies of {widths[0]:,} and {widths[1]:,} tokens: the first"
                    f" {min(widths):,} were compared; the others (padding?) get up to"
                    f" {share:.2%} of the probability"
                )


def _rows(step: Step) -> int:
    return 1 if step.generating else step.shape[1]


def _count(step: Step) -> int:
    """Return how many tokens a step has."""
    return step.shape[0] * _rows(step)
