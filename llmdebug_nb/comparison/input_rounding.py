"""What a program rounds before it multiplies: noise of a product's inputs.

llama.cpp multiplies quantised weights by integers: it brings the other factor to blocks of 8 bits.
What that moves is known from the factor's values, and the product shows it like any other error of
its inputs, amplified as these are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.measured import error_of
from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import is_floating
from llmdebug_nb.core.ggml import PRODUCTS
from llmdebug_nb.core.kernels import ggml_blocks
from llmdebug_nb.core.kernels.fingerprint import same
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import CallKey, Record

INPUT_ROUNDING = "input_rounding"  # the figure of a row: that error, relative
Kinds = Mapping[str, str]  # path of a module -> ggml's type of the weight that it multiplies with


@dataclass(frozen=True, slots=True)
class Factor:
    """An input that golden's (0) or mine's (1) program rounds. ``kind``: of the weight."""

    record: Record
    side: int
    kind: str

    def error(self, values: torch.Tensor) -> float:
        """Return the relative error that the rounding makes, as it is judged."""
        x = values.float().flatten(1) if values.dim() > 1 else values.float()[None]
        try:
            return error_of(metrics.compare(x, ggml_blocks.roundings_of(self.kind)[0](x)))
        except RuntimeError:  # its rows are no blocks
            return 0.0

    @property
    def largest_error(self) -> float:
        """The largest one that goes with its statistics: all blocks have its largest element."""
        s = self.record.summary
        if not s.l2norm or s.max is None or s.min is None:
            return 0.0
        step = max(abs(s.max), abs(s.min)) / constants.BYTE_STEPS
        return step / math.sqrt(12) / (s.l2norm / math.sqrt(s.numel))


class Factors:
    """The inputs that products of golden and mine round. ``kinds``: of both programs."""

    def __init__(self, pairs: Iterable[Pair], kinds: tuple[Kinds, Kinds]) -> None:
        self._kinds = kinds
        self._inputs: tuple[dict[CallKey, dict[int, Factor]], ...]
        self._inputs = defaultdict(dict), defaultdict(dict)
        for pair in pairs if any(kinds) else ():
            for side, record in enumerate((pair.golden, pair.mine)):
                kind = self._kind(record, side)
                if record is not None and record.site.role == "input" and kind:
                    factor = Factor(record, side, kind)
                    self._inputs[side][record.site.key][record.id] = factor

    def of(self, pair: Pair) -> tuple[Factor, ...]:
        """Return what was rounded for two outputs; nothing if both rounded the same."""
        sides: list[Sequence[Factor]] = [
            list(self._inputs[side].get(record.site.key, {}).values())
            if record is not None and record.site.role == "output"
            else []
            for side, record in enumerate((pair.golden, pair.mine))
        ]
        return () if _are_equal(*sides) else (*sides[0], *sides[1])

    def _kind(self, record: Record | None, side: int) -> str:
        """Return the type of the weight that a call multiplies with, "" if it rounds nothing."""
        if record is None or not is_floating(record.summary.dtype) or record.kept is not None:
            return ""
        path = record.site.path
        if is_operator(path) and record.op not in PRODUCTS:
            return ""
        kind = self._kinds[side].get(module_of(path), "")
        return kind if ggml_blocks.is_of_blocks(kind) else ""


def _are_equal(golden: Sequence[Factor], mine: Sequence[Factor]) -> bool:
    return len(golden) == len(mine) and all(
        a.kind == b.kind and same(a.record.summary.fingerprint, b.record.summary.fingerprint)
        for a, b in zip(golden, mine, strict=True)
    )
