"""Limits that the user fixes by path and dtype. They replace those that noise explains.

"*":                                   # a glob over paths; the last one that fits counts
  cosine_similarity: 0.999             # at least; all other metrics: at most
  max_absolute_error: 1e-3             # both must hold
"model.layers.*.mlp*":
  bfloat16: {relative_l2: 0.02}        # if this (a glob) is the coarser dtype of the two
  "*": {relative_l2: 1e-5}
lm_head: msit_logits                   # rules by name: see RULES
model.norm: [{cosine: 0.999}, {max_abs: 1e-6}]   # a list: one of them must hold
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from llmdebug_nb.align.pairs import Pair
from llmdebug_nb.comparison.columns import ALIASES
from llmdebug_nb.comparison.metrics import FIELDS, LOGITS, STATISTICS, WEIGHTS, Metrics
from llmdebug_nb.core.dtypes import coarsest
from llmdebug_nb.core.errors import OptionError, nearest

if TYPE_CHECKING:
    import yaml

AT_LEAST = ("cosine_similarity", "one_thousandth_err_ratio", "five_thousandths_err_ratio")
# upstream's verdicts on one pair of tensors: one of these sets of conditions must hold
RULES: dict[str, list[dict[str, float]]] = {
    # msit compare -cl logits
    "msit_logits": [
        {"cosine_similarity": 0.999, "kl_divergence": 1e-4, "l1_norm": 0.01},
        {"max_gap_ulp": 1},
    ],
    # msprobe up to 8.3: "Accuracy Reached or Not"
    "msprobe": [
        {"cosine_similarity": 0.99, "max_absolute_error": 1.0},
        {"cosine_similarity": 0.9, "max_absolute_error": 0.001},
    ],
}
Conditions = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Judged:
    """How a rule judges a pair: the figure closest to its limit, or furthest beyond it."""

    error: float
    limit: float
    says: str


@dataclass(frozen=True, slots=True)
class _Rule:
    path: str
    dtype: str
    any_of: Conditions
    where: str

    def fits(self, path: str, dtype: str) -> bool:
        return fnmatchcase(path, self.path) and fnmatchcase(dtype, self.dtype)

    def judge(self, metrics: Metrics) -> Judged | None:
        """Return the verdict of the easiest set of conditions, None if no set has its figures."""
        worst = []
        for conditions in self.any_of:
            judged = [_condition(name, metrics.get(name), x) for name, x in conditions.items()]
            known = [each for each in judged if each is not None]
            if len(known) == len(judged):
                worst.append(max(known, key=_excess))
        if not worst:
            return None
        best = min(worst, key=_excess)
        return Judged(best.error, best.limit, f"{best.says} ({self.where})")


def _excess(judged: Judged) -> float:
    """Return the figure over its limit."""
    return judged.error / judged.limit if judged.limit else math.inf if judged.error > 0 else 0.0


def _condition(name: str, value: float | int | None, bound: float) -> Judged | None:
    if value is None:
        return None
    if name in AT_LEAST:
        return Judged(1.0 - float(value), 1.0 - bound, f"{name} {value:.6g}, at least {bound:g}")
    return Judged(abs(float(value)), bound, f"{name} {value:.3g}, at most {bound:g}")


class Limits:
    """Rules in the order given. ``says``: where they come from."""

    def __init__(self, rules: list[_Rule], says: str) -> None:
        self.rules, self.says = rules, says

    def of(self, pair: Pair, metrics: Metrics) -> Judged | None:
        """Return the verdict of the last rule that fits, None if none does or nothing is known."""
        dtypes = [r.summary.dtype for r in (pair.golden, pair.mine) if r is not None]
        dtype = coarsest(dtypes) or dtypes[0]
        path = pair.either.site.path
        if not metrics:
            return None
        rule = next((rule for rule in reversed(self.rules) if rule.fits(path, dtype)), None)
        return None if rule is None else rule.judge(metrics)

    def judge(self, metrics: Metrics) -> Judged | None:
        """Return the verdict of the last rule, wherever the metrics are from; None if unknown."""
        return self.rules[-1].judge(metrics)

    def fixes(self, pair: Pair, metrics: Metrics) -> bool:
        """Tell whether a rule judges a pair."""
        return self.of(pair, metrics) is not None

    @classmethod
    def read(cls, limits: object, custom: Iterable[str] = ()) -> Limits:
        """Read a mapping, or a YAML or JSON file of one. ``custom``: names of the user's metrics.

        Raises:
            OptionError: names the key, and for a file the line.
        """
        if isinstance(limits, Mapping):
            return cls(list(_RuleReader("limits", {}, custom).rules(limits)), "limits")
        if not isinstance(limits, (str, os.PathLike)):
            raise OptionError(
                f"limits {limits!r}: expected a mapping of path globs, or a YAML or JSON file of it"
            )
        path = Path(limits)
        tree, lines = _load(path)
        return cls(list(_RuleReader(path.name, lines, custom).rules(tree)), path.name)


class _RuleReader:
    """Reads rules from nested mappings. ``lines``: key path -> line of the file."""

    def __init__(
        self, name: str, lines: Mapping[tuple[str, ...], int], custom: Iterable[str]
    ) -> None:
        self._name, self._lines = name, lines
        kinds = ("absolute", "relative")
        of_statistics = (f"{s}_stat_{kind}_error" for s in STATISTICS for kind in kinds)
        self._known = [*FIELDS, *WEIGHTS, *LOGITS, *of_statistics, *custom]

    def rules(self, tree: object) -> Iterator[_Rule]:
        """Yield the rules in the order written. Raises OptionError."""
        if not isinstance(tree, Mapping) or not tree:
            raise self._error((), f"{_short(tree)} is not a mapping of path globs to limits")
        for path, value in tree.items():
            at = (str(path),)
            if not isinstance(value, Mapping) or not self._is_by_dtype(value):
                yield _Rule(str(path), "*", self._any_of(value, at), self._where(at))
                continue
            for dtype, inner in value.items():
                both = str(path), str(dtype)
                yield _Rule(*both, self._any_of(inner, both), self._where(both))

    def _is_by_dtype(self, value: Mapping[object, object]) -> bool:
        """Tell whether the keys of a mapping are dtypes, not metrics."""
        metrics = any(self._is_metric(key) for key in value)
        return bool(value) and not metrics and not _has_numbers(value)

    def _any_of(self, value: object, at: tuple[str, ...]) -> Conditions:
        if isinstance(value, str):
            if value not in RULES:
                raise self._error(at, f"{value!r} is not a rule{nearest(value, RULES)}")
            return RULES[value]
        items = value if isinstance(value, list) else [value]
        mappings = [item for item in items if isinstance(item, Mapping) and item]
        if not items or len(mappings) < len(items):
            expected = f"metric: number, a rule ({', '.join(RULES)}) or a list of these"
            raise self._error(at, f"expected {expected}, not {_short(value)}")
        return [
            dict(self._condition(name, bound, (*at, str(name))) for name, bound in item.items())
            for item in mappings
        ]

    def _condition(self, name: object, bound: object, at: tuple[str, ...]) -> tuple[str, float]:
        if not self._is_metric(name):
            close = nearest(str(name), [*self._known, *ALIASES])
            raise self._error(at, f"{_short(name)} is not a metric{close}")
        number = _number(bound)
        if number is None or math.isnan(number) or isinstance(bound, bool) or number < 0:
            raise self._error(at, f"{_short(bound)} is not a limit; expected a number, 0 or more")
        return ALIASES.get(str(name), str(name)), number

    def _is_metric(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._known or name in ALIASES)

    def _where(self, at: tuple[str, ...]) -> str:
        """Return name, line and keys of a place; the line of the innermost key that has one."""
        if not at:
            return self._name
        lines = (self._lines.get(at[:n]) for n in range(len(at), 0, -1))
        line = next((found for found in lines if found is not None), None)
        return f"{self._name}{f', line {line}' if line else ''}: {' > '.join(at)}"

    def _error(self, at: tuple[str, ...], says: str) -> OptionError:
        return OptionError(f"{self._where(at)}: {says}")


def _has_numbers(value: Mapping[object, object]) -> bool:
    return any(
        not isinstance(inner, (Mapping, list, str)) or _number(inner) is not None
        for inner in value.values()
    )


def _number(value: object) -> float | None:
    """Read a number; YAML reads 1e-3 as a text."""
    try:
        return float(value) if isinstance(value, (str, SupportsFloat)) else None
    except (TypeError, ValueError):
        return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _load(path: Path) -> tuple[object, dict[tuple[str, ...], int]]:
    """Read a YAML or JSON file; also return the line of each key path. Raises OptionError."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"limits {str(path)!r} can't be read: {reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "no YAML or JSON"
        raise OptionError(f"{path.name}{line}: {problem}") from None
    return tree, dict(_lines(node, (), path.name))


def _lines(
    node: yaml.Node | None, at: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield key path and line of each key. Raises OptionError for a key that is repeated."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item, at, name)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                keys = " > ".join((*at, str(key.value)))
                first = seen[key.value]
                raise OptionError(f"{name}, line {line}: {keys} stands on line {first} already")
            seen[key.value] = line
            yield (*at, str(key.value)), line
            yield from _lines(value, (*at, str(key.value)), name)
