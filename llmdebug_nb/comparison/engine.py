"""Pairs in, differences out; each distinct pair of payloads is read and measured once, as a stream, and all are judged at the end.

Where both sides keep the same part of a tensor, the parts are measured and the statistics, which are those of
the whole, are held against each other as well: they notice what is wrong outside of the part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmdebug_nb.comparison import metrics
from llmdebug_nb.comparison.custom import Custom
from llmdebug_nb.comparison.limits import Limits
from llmdebug_nb.comparison.tolerance import UNMATCHED, Calibration, Judging, Measured, error_of
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.findings import Pair
from llmdebug_nb.core.kernels.fingerprint import same
from llmdebug_nb.core.paths import within
from llmdebug_nb.core.records import Node, Record, Summary

if TYPE_CHECKING:
    import torch

Load = Callable[[Record], "torch.Tensor"]
UNINITIALISED = "memory that nothing was written to yet: there are no values to compare"
_EMPTY = re.compile(
    r"(.*\.)?(new_)?empty(_like|_strided|_permuted|_quantized)?(\.\w+)?"
)  # operators that give such
STATS_ONLY = "judged by statistics: "
__all__ = ["STATS_ONLY", "UNMATCHED", "judging", "measure"]


def judging(
    pairs: Iterable[Pair], load_golden: Load, load_mine: Load, *, nodes: Sequence[Node] = (), limits: Limits | None = None,
    calibration: Calibration | None = None, custom: Custom | None = None,
) -> Judging:  # fmt: skip
    """Measure all pairs, which must be in golden's execution order, and return what judges them.

    A payload that can't be read becomes a row with a reason; it never ends the comparison. ``nodes``: golden's modules.
    """
    tree = _Tree(nodes)
    measured = list(measure(pairs, load_golden, load_mine, tree, custom))
    return Judging(measured, size=tree.size, limits=limits, calibration=calibration)


def measure(
    pairs: Iterable[Pair],
    load_golden: Load,
    load_mine: Load,
    nodes: Sequence[Node] | _Tree = (),
    custom: Custom | None = None,
) -> Iterator[Measured]:
    """Yield each pair, measured, in order."""
    reader = _Reader(
        load_golden,
        load_mine,
        nodes if isinstance(nodes, _Tree) else _Tree(nodes),
        custom or Custom(),
    )
    for index, pair in enumerate(pairs):
        yield reader.measured(index, pair)


class _Tree:
    """What is known of the modules."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._sizes = Counter(around for node in nodes for around in _around(node.path))
        shapes = {
            node.path: [tuple(shape) for shape in node.params.values() if len(shape) == 2]
            for node in nodes
        }
        embeddings = {node.path for node in nodes if "embedding" in node.type.lower()}
        tables = {shape for path in embeddings for shape in shapes[path]}
        # what projects back onto an embedding's rows, tied to it or not; and the roots, which may do so by themselves
        self._heads = {
            path for path in shapes if path not in embeddings and tables.intersection(shapes[path])
        }
        self._heads |= {node.path for node in nodes if node.parent < 0}
        self._vocabularies = {rows for rows, _ in tables}

    def size(self, path: str) -> int:
        """Return how many modules lie within one."""
        return self._sizes[path]

    def are_logits(self, record: Record) -> bool:
        """Tell whether a tensor is an output whose last axis is the vocabulary."""
        site, summary = record.site, record.summary
        if (
            site.role != "output"
            or site.phase != "forward"
            or not summary.shape
            or "float" not in summary.dtype
        ):
            return False
        if self._vocabularies:
            return site.path in self._heads and summary.shape[-1] in self._vocabularies
        return "logits" in (site.slot, site.path.rpartition(".")[2])


def _around(path: str) -> Iterator[str]:
    """Yield the paths of all modules around one."""
    if path and within(path, ""):
        yield ""
    yield from (path[:at] for at, character in enumerate(path) if character in "./")


class _Reader:
    def __init__(self, load_golden: Load, load_mine: Load, tree: _Tree, custom: Custom) -> None:
        self._load_golden, self._load_mine, self._tree, self._custom = (
            load_golden,
            load_mine,
            tree,
            custom,
        )
        self._empty: tuple[set[int], set[int]] = (
            set(),
            set(),
        )  # records of memory that nothing was written to, by side
        self._measured: dict[tuple[Any, ...], metrics.Metrics] = {}

    def measured(self, index: int, pair: Pair) -> Measured:
        golden, mine = pair.golden, pair.mine
        if golden is None or mine is None:
            side = "mine" if golden is None else "golden"
            return Measured(index, pair, remark=f"only in {side}: {pair.why}")
        if self._is_empty(golden, mine):
            return Measured(index, pair, remark=UNINITIALISED)
        a, b = golden.summary, mine.summary
        if a.shape != b.shape and pair.fit is None:
            return Measured(
                index, pair, remark=f"shape {list(a.shape)} against {list(b.shape)}", certain=True
            )
        same_bytes = (
            same(a.fingerprint, b.fingerprint) if a.dtype == b.dtype and pair.fit is None else None
        )
        values, remark = self._metrics(pair, golden, mine, same_bytes)
        return Measured(
            index, pair, values, remark, same_bytes, certain=values is None and same_bytes is False
        )

    def _is_empty(self, *sides: Record) -> bool:
        """Tell whether a pair is memory that was allocated and not written to: what an operator like `empty` gave, as it gave it."""
        for record, empty in zip(sides, self._empty, strict=True):
            made = (
                record.site.role == "output"
                and "/" in record.site.path
                and _EMPTY.fullmatch(record.op) is not None
            )
            if made or (record.site.role == "input" and record.producer in empty):
                empty.add(record.id)
        return any(record.id in empty for record, empty in zip(sides, self._empty, strict=True))

    def _metrics(
        self, pair: Pair, golden: Record, mine: Record, same_bytes: bool | None
    ) -> tuple[metrics.Metrics | None, str | None]:
        """Return metrics and a remark; None and the reason where the two can't be measured."""
        a, b = golden.summary, mine.summary
        logits = self._tree.are_logits(golden)
        if same_bytes and not self._custom.names:
            return metrics.identical(a, logits), None
        if golden.payload is None or mine.payload is None:
            if same_bytes:
                return metrics.identical(a, logits), None
            sides = [
                name
                for name, record in (("golden", golden), ("mine", mine))
                if record.payload is None
            ]
            return _by_statistics(pair, a, b, f"no values on {' and '.join(sides)}")
        if (golden.kept, golden.kept_shape) != (mine.kept, mine.kept_shape):
            return _by_statistics(pair, a, b, f"golden keeps {_part(golden)}, mine {_part(mine)}")
        if pair.fit is not None and golden.kept is not None:
            return _by_statistics(pair, a, b, f"both keep {golden.kept}")
        key = (golden.payload, mine.payload, logits, pair.fit and pair.fit.says)
        try:
            if key not in self._measured:
                self._measured[key] = self._compare(
                    pair, golden, mine, logits and golden.kept is None
                )
        except (CorruptDumpError, TensorLookupError, ValueError) as error:
            return None, str(error)
        if golden.kept is None:
            return self._measured[key], None
        values = self._measured[key] | metrics.statistics(a, b)
        if not golden.kept.startswith("slice"):  # figures in float64, whatever the tensor was
            values |= {"max_ulp": None, "mean_ulp": None}
        return values, f"judged by {golden.kept} and statistics"

    def _compare(self, pair: Pair, golden: Record, mine: Record, logits: bool) -> metrics.Metrics:
        g, m = self._load_golden(golden), self._load_mine(mine)
        fit = pair.fit
        if fit is not None:
            g, m = fit(g, m)
        return metrics.compare(g, m, logits) | self._custom.measure(g, m, pair.either.site)


def error(golden: torch.Tensor, mine: torch.Tensor) -> float:
    """Return the figure that is judged of two tensors of equal shape. Raises ValueError."""
    return error_of(metrics.compare(golden, mine))


def _by_statistics(
    pair: Pair, a: Summary, b: Summary, why: str
) -> tuple[metrics.Metrics | None, str | None]:
    if pair.fit is not None and not pair.fit.whole:
        return None, f"{why}, and statistics are of all of it ({pair.fit.says})"
    values = metrics.statistics(a, b)
    if a.numel and all(value is None for value in values.values()):
        return None, f"{why}, and no statistics to judge by"
    return values, STATS_ONLY + why


def _part(record: Record) -> str:
    return record.kept or "all of it"
