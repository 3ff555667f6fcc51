"""The use case: compare the logits of two programs, token by token."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.app.differences import ResultTable, write_text
from llmdebug_nb.app.logits.pairing import Pairing
from llmdebug_nb.app.logits.sources import Source, of_run
from llmdebug_nb.app.logits.texts import Texts, of_engine
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.comparison.epsilons import told
from llmdebug_nb.comparison.token_checks import LogitsResult, TokenCheck, Verdict
from llmdebug_nb.comparison.token_rows import Judge
from llmdebug_nb.core import constants
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.show import logits as shown
from llmdebug_nb.show.tokens import Tokenizer, checked
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import pandas
    import torch
    from matplotlib.figure import Figure

    from llmdebug_nb.app.logits.by_layer import ByLayer
    from llmdebug_nb.app.logits.repeat import Repeated

RunLike: TypeAlias = "Run | str | os.PathLike[str]"
Rule: TypeAlias = "str | Mapping[str, float]"
_MOST = 1000  # of top-k
_KINDS = "a run, its name or path, or a torch.nn.Module"


class LogitsCheck(ResultTable):
    """The result of `logits`. ``result``: all tokens."""

    def __init__(
        self,
        result: LogitsResult,
        tokenizer: Tokenizer | None = None,
        runs: tuple[Run, Run] | None = None,
    ) -> None:
        """``runs``: golden and mine, if both are recorded."""
        self.result = result
        self._runs = runs
        self._words = shown.words(tokenizer)

    @property
    def verdict(self) -> Verdict:
        """``pass``, ``fail``, or ``not compared`` if no token was."""
        return self.result.verdict

    @property
    def first_flip(self) -> TokenCheck | None:
        """The first token that differs, or None."""
        return self.result.first_flip

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row for each token: msit's columns first, then ours."""
        import pandas

        return pandas.DataFrame(shown.rows(self.result, self._words), columns=shown.COLUMNS)

    def by_request(self) -> pandas.DataFrame:
        """Return one row for each sequence or request with sampled tokens.

        ``mean_ratio``, ``least_ratio``, ``largest_ratio``: importance ratios, golden's probability
        of a sampled token over mine's. ``clipped``: the share of them beyond ``clip``. ``mean_kl``:
        KL(golden || mine) in nats. ``worst_step``: the position or step of the farthest ratio.
        """
        import pandas

        return pandas.DataFrame(shown.by_request(self.result), columns=shown.BY_REQUEST)

    def by_layer(self, model: torch.nn.Module, progress: bool = True) -> ByLayer:
        """Return which parts of a model the difference of the logits comes from.

        ``model``: the live model of one of the two runs; it is left unchanged. The values that the
        other run holds are put into it part by part, and it runs on.

        Raises:
            OptionError: the model is of neither run, or mine is no run.
            CompareError: no sequence can be run again, or the logits are the same.
        """
        from llmdebug_nb.app.logits.by_layer import by_layer

        if self._runs is None:
            raise OptionError("by_layer needs two runs: record mine, too, with its modules")
        return by_layer(*self._runs, model, progress)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page. Raises StoreError."""
        from llmdebug_nb.show.logits_page import page

        return write_text(path, page(self.result, self._words))

    def figure(self) -> Figure:
        """Return the picture: KL by sequence and token, and the probability of golden's tokens.

        Raises OptionError: no token was compared.
        """
        from llmdebug_nb.show.logits_figure import strip

        return strip(self.result, self._words)

    def __str__(self) -> str:
        return shown.text(self.result, self._words)

    def _repr_html_(self) -> str:
        from llmdebug_nb.show.logits_page import fragment

        return fragment(self.result, self._words)


def logits(
    golden: RunLike | torch.nn.Module | Callable[[], object],
    mine: RunLike | torch.nn.Module | None = None,
    *,
    inputs: torch.Tensor | Mapping[str, object] | None = None,
    rule: Rule = "rounding",
    top: int = 5,
    clip: float | None = None,
    at: str | tuple[str | None, str | None] | None = None,
    tokenizer: Tokenizer | None = None,
    progress: bool = True,
) -> LogitsCheck | Repeated:
    """Compare the logits of two programs, each token after the same tokens.

        check = ld.logits("golden", "mine")         # two runs
        check = ld.logits("golden", port)           # a live model, given golden's tokens
        check.verdict, check.first_flip
        ld.logits(model, inputs=ids)                # one model twice: is it deterministic?
        ld.logits(lambda: model.generate(ids))      # or one program

    Args:
        golden: a run, its name or path, a dump of another tool or a file of logits; without
            ``mine``, a model or a callable that is run twice.
        mine: the same, or a live model. It is given golden's tokens and is left unchanged.
        inputs: for a model that is run twice, its input: a tensor, or keyword arguments.
        rule: what passes: ``rounding``, ``msit``, ``tokens``, ``equal``, or limits by metric,
            ``{"kl_divergence": 1e-3}``.
        top: the k of top-k.
        clip: importance ratios (golden's probability of a sampled token over mine's) outside of
            ``1 - clip`` to ``1 + clip`` are counted; None: 0.2.
        at: the tensor to take, as ``path`` or ``path[slot]``; a pair of them for golden and mine.
        tokenizer: any object with ``decode(ids)``; without one, tokens are shown as ids.
        progress: show a progress bar when it takes more than a second.

    Raises:
        OptionError: an option is wrong.
        CompareError: a run has no logits, or the model fails on golden's tokens.
        UnknownRunError, CorruptDumpError: a run can't be opened.
    """
    if mine is None:
        from llmdebug_nb.app.logits.repeat import repeated

        return repeated(golden, inputs)
    if inputs is not None:
        raise OptionError("inputs are for a model that is run twice: leave out mine, or inputs")
    tokenizer = checked(tokenizer)
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= _MOST:
        raise OptionError(f"top: {top!r}; expected a whole number from 1 to {_MOST}")
    clip = constants.CLIP if clip is None else clip
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 <= clip < math.inf:
        raise OptionError(f"clip: {clip!r}; expected a number from 0, such as {constants.CLIP}")
    places = at if isinstance(at, tuple) else (at, at)
    run = _recorded(golden)
    other = open_run(mine) if isinstance(mine, (Run, str, os.PathLike)) else None
    judge = Judge(rule, max(told(each.rounding) for each in (run, other) if each is not None))
    first, second, texts = _sources(run, mine if other is None else other, places, progress)
    result = Pairing(first, second, judge, top, clip, texts).run(progress)
    return LogitsCheck(result, tokenizer, None if other is None else (run, other))


def _recorded(golden: object) -> Run:
    if not isinstance(golden, (Run, str, os.PathLike)):
        kind = type(golden).__name__
        raise OptionError(
            f"golden: expected a run, its name or path, got {kind}; record it first:"
            " with ld.dump(model, name='golden', tokens='all')"
        )
    return open_run(golden)


def _sources(
    golden: Run, mine: object, at: tuple[str | None, str | None], progress: bool
) -> tuple[Source, Source, Texts | None]:
    if isinstance(mine, Run):
        texts = of_engine(golden, mine, at)
        if texts is not None:
            return texts.golden, texts.mine, texts
        return of_run(golden, at[0]), of_run(mine, at[1]), None
    import torch

    if not isinstance(mine, torch.nn.Module):
        raise OptionError(f"mine: expected {_KINDS}, got {type(mine).__name__}")
    from llmdebug_nb.app.logits.live import of_model

    first = of_run(golden, at[0])
    return first, of_model(mine, first, progress), None
