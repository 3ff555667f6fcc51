"""The use case: compare two set-ups before any deep dive."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeAlias

from llmdebug_nb.app.differences import ResultTable
from llmdebug_nb.core.errors import OptionError
from llmdebug_nb.core.setups import DoctorResult, Symptom, Verdict
from llmdebug_nb.show import doctor as shown

if TYPE_CHECKING:
    import pandas
    import torch

    from llmdebug_nb.app.doctor.tokenizers import Encoder
    from llmdebug_nb.core.setups import Setup
    from llmdebug_nb.store.run import Run

What: TypeAlias = "Run | torch.nn.Module | str | os.PathLike[str]"


class Diagnosis(ResultTable):
    """The result of `doctor`. ``result``: all differences, the most suspicious first."""

    def __init__(self, result: DoctorResult) -> None:
        self.result = result

    @property
    def verdict(self) -> Verdict:
        """``same``, ``suspicious``, or ``not compared``."""
        return self.result.verdict

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        """All differences, the most suspicious first."""
        return self.result.symptoms

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each difference: level, section, name, golden, mine, can, do."""
        import pandas

        names = list(Symptom.__dataclass_fields__)
        return pandas.DataFrame([asdict(each) for each in self.symptoms], columns=names)

    def __str__(self) -> str:
        return shown.text(self.result)

    def _repr_html_(self) -> str:
        return shown.fragment(self.result)


def doctor(
    golden: What,
    mine: What,
    *,
    tokenizer: Encoder | tuple[Encoder | None, Encoder | None] | None = None,
    texts: Iterable[str] | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Tell what differs between two set-ups, the most suspicious first.

        print(ld.doctor("golden", "mine"))                  # two runs
        print(ld.doctor(model, "path/of/checkpoint"))       # is it loaded rightly?

    Versions, dtypes, attention implementation, seeds, switches, configs, the ids of the prompt, and
    every weight are compared. What one side does not know is counted.

    Args:
        golden, mine: a run, its name or path, a live model, the folder of a checkpoint, or a
            GGUF file (with the package gguf).
        tokenizer: that of both, or one of each: ids of the same texts and messages are compared.
        texts: in place of a few that tokenizers differ in.
        progress: show a progress bar when it takes more than a second.

    Raises:
        OptionError: there is no such set-up, or a tokenizer fails.
        UnknownRunError, CorruptDumpError: a run or a GGUF file can't be opened.
        MissingPackageError: a GGUF file without the package gguf.
    """
    from llmdebug_nb.app.doctor import setups
    from llmdebug_nb.app.doctor.comparing import compared
    from llmdebug_nb.app.doctor.tokenizers import TEXTS

    given = tokenizer if isinstance(tokenizer, tuple) else (tokenizer, tokenizer)
    if len(given) != 2:
        raise OptionError(f"tokenizer: {len(given)} of them; expected one, or golden's and mine's")
    chosen = TEXTS if texts is None else tuple(texts)
    sides = [
        _with_tokenizer(setups.of(what), one, chosen)
        for what, one in zip((golden, mine), given, strict=True)
    ]
    return Diagnosis(compared(sides[0], sides[1], progress))


def _with_tokenizer(setup: Setup, tokenizer: Encoder | None, texts: tuple[str, ...]) -> Setup:
    from llmdebug_nb.app.doctor.tokenizers import facts

    if tokenizer is None:
        return setup
    if not callable(getattr(tokenizer, "encode", None)):
        raise OptionError(
            f"tokenizer: expected one with a method encode(text), got {type(tokenizer).__name__}"
        )
    return replace(setup, facts={**setup.facts, "tokenizer": facts(tokenizer, texts)})
