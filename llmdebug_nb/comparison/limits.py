"""Limits that the user fixes, per path and per dtype, in place of those that follow from noise.

"*":                                   # a glob over paths; of several that fit, the last one counts
  cosine_similarity: 0.999             # at least; all other metrics: at most
  max_absolute_error: 1e-3             # both must hold
"model.layers.*.mlp*":
  bfloat16: {relative_l2: 0.02}        # only where the coarser dtype of the two is this one (a glob)
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
from typing import Any

from llmdebug_nb.comparison.columns import ALIASES
from llmdebug_nb.comparison.metrics import FIELDS, LOGITS, STATISTICS, Metrics, coarser
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.findings import Pair

AT_LEAST = ("cosine_similarity", "one_thousandth_err_ratio", "five_thousandths_err_ratio")
# upstream's verdicts, where they are on one pair of tensors: any of these sets of conditions holds
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
    """What a rule made of a pair: the figure nearest to its limit, or furthest beyond."""

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
        """Return what the easiest set of conditions says, None if no set has all its figures."""
        sets = [
            [_condition(name, metrics.get(name), bound) for name, bound in one.items()]
            for one in self.any_of
        ]
        known = [max(one, key=_excess) for one in sets if all(c is not None for c in one)]  # type: ignore[arg-type]
        if not known:
            return None
        best = min(known, key=_excess)  # type: ignore[arg-type]
        assert best is not None
        return Judged(best.error, best.limit, f"{best.says} ({self.where})")


def _excess(judged: Judged) -> float:
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
        """Return what the last rule that fits says, None where none fits or its metrics were not measured."""
        sides = [record for record in (pair.golden, pair.mine) if record is not None]
        dtype = coarser(sides[0].summary.dtype, sides[-1].summary.dtype)
        path = pair.either.site.path
        if not metrics:
            return None
        rule = next((rule for rule in reversed(self.rules) if rule.fits(path, dtype)), None)
        return None if rule is None else rule.judge(metrics)

    def fixes(self, pair: Pair, metrics: Metrics) -> bool:
        """Tell whether a rule judges a pair."""
        return self.of(pair, metrics) is not None

    @classmethod
    def read(cls, given: Any, custom: Iterable[str] = ()) -> Limits:
        """Read a mapping, or a YAML or JSON file of one. ``custom``: names of user metrics.

        Raises:
            OptionError: names the key, and in a file the line.
        """
        if isinstance(given, Mapping):
            return cls(list(_Reader("limits", {}, custom).rules(given)), "limits")
        if not isinstance(given, (str, os.PathLike)):
            raise OptionError(
                f"limits {given!r}: expected a mapping of path globs, or a YAML or JSON file of one"
            )
        path = Path(given)
        tree, lines = _load(path)
        return cls(list(_Reader(path.name, lines, custom).rules(tree)), path.name)


class _Reader:
    """Reads rules out of nested mappings. ``lines``: key path -> line of the file."""

    def __init__(
        self, name: str, lines: Mapping[tuple[str, ...], int], custom: Iterable[str]
    ) -> None:
        self._name, self._lines = name, lines
        self._known = [
            *FIELDS,
            *LOGITS,
            *(f"{s}_stat_{kind}_error" for s in STATISTICS for kind in ("absolute", "relative")),
            *custom,
        ]

    def rules(self, tree: Any) -> Iterator[_Rule]:
        if not isinstance(tree, Mapping) or not tree:
            raise self._error((), f"{_short(tree)} is no mapping of path globs to limits")
        for path, value in tree.items():
            at = (str(path),)
            if (
                isinstance(value, Mapping)
                and value
                and not any(self._is_metric(key) for key in value)
                and not _scalars(value)
            ):
                for dtype, inner in value.items():
                    yield _Rule(
                        str(path),
                        str(dtype),
                        self._any_of(inner, (*at, str(dtype))),
                        self._where((*at, str(dtype))),
                    )
            else:
                yield _Rule(str(path), "*", self._any_of(value, at), self._where(at))

    def _any_of(self, value: Any, at: tuple[str, ...]) -> Conditions:
        if isinstance(value, str):
            if value not in RULES:
                raise self._error(at, f"{value!r} is no rule{nearest(value, RULES)}")
            return RULES[value]
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, Mapping) and item for item in items):
            raise self._error(
                at,
                f"expected metric: number, a rule ({', '.join(RULES)}) or a list of these, not {_short(value)}",
            )
        return [
            dict(self._condition(name, bound, (*at, str(name))) for name, bound in item.items())
            for item in items
        ]

    def _condition(self, name: Any, bound: Any, at: tuple[str, ...]) -> tuple[str, float]:
        if not self._is_metric(name):
            raise self._error(
                at, f"{_short(name)} is no metric{nearest(str(name), [*self._known, *ALIASES])}"
            )
        try:
            number = float(bound)  # YAML reads 1e-3 as a text
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number) or isinstance(bound, bool) or number < 0:
            raise self._error(at, f"{_short(bound)} is no limit; expected a number, 0 or more")
        return ALIASES.get(str(name), str(name)), number

    def _is_metric(self, name: Any) -> bool:
        return isinstance(name, str) and (name in self._known or name in ALIASES)

    def _where(self, at: tuple[str, ...]) -> str:
        line = next(
            (self._lines[at[:n]] for n in range(len(at), 0, -1) if at[:n] in self._lines), None
        )
        return (
            f"{self._name}{f', line {line}' if line else ''}: {' > '.join(at)}"
            if at
            else self._name
        )

    def _error(self, at: tuple[str, ...], says: str) -> OptionError:
        return OptionError(f"{self._where(at)}: {says}")


def _scalars(value: Mapping[Any, Any]) -> bool:
    return any(
        not isinstance(inner, (Mapping, list, str)) or _is_number(inner) for inner in value.values()
    )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _load(path: Path) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read a YAML file, of which JSON is a part; also return on which line each key stands."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"limits {str(path)!r} can't be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise OptionError(
            f"{path.name}{line}: {getattr(error, 'problem', None) or 'no YAML or JSON'}"
        ) from None
    return tree, dict(_lines(node, (), path.name))


def _lines(node: Any, at: tuple[str, ...], name: str) -> Iterator[tuple[tuple[str, ...], int]]:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item, at, name)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise OptionError(
                    f"{name}, line {line}: {' > '.join((*at, str(key.value)))} stands on line {seen[key.value]} already"
                )
            seen[key.value] = line
            yield (*at, str(key.value)), line
            yield from _lines(value, (*at, str(key.value)), name)
