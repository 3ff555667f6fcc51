"""Two set-ups, compared fact by fact and weight by weight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from llmdebug_nb.app.doctor import setups
from llmdebug_nb.app.doctor.gguf_weights import Conversion, met
from llmdebug_nb.app.doctor.knowledge import known
from llmdebug_nb.core import constants
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.dtypes import DTYPES, coarsest
from llmdebug_nb.core.kernels.fingerprint import same
from llmdebug_nb.core.setups import LEVELS, SECTIONS, DoctorResult, Setup, Symptom, Weight

ABSENT = "(absent)"
TIED = "tied to a weight that both have"
_NAMES = 4  # of weights that one symptom names
_FACTS = tuple(section for section in SECTIONS if section != "weights")


def compared(golden: Setup, mine: Setup, progress: bool = True) -> DoctorResult:
    """Return all that differs, the most suspicious first."""
    comparison = _Comparison(golden, mine)
    symptoms = [*comparison.facts(), *comparison.weights(progress)]
    order = {name: number for number, name in enumerate(SECTIONS)}
    symptoms.sort(key=lambda s: (LEVELS.index(s.level), order.get(s.section, len(order))))
    return DoctorResult(
        golden.name, mine.name, tuple(symptoms), dict(comparison.compared),
        dict(comparison.not_compared),
    )  # fmt: skip


class _Comparison:
    def __init__(self, golden: Setup, mine: Setup) -> None:
        self._golden, self._mine, self._conversion, self._turned = met(golden, mine)
        self.compared: Counter[str] = Counter()
        self.not_compared: Counter[str] = Counter()
        self._contents: dict[tuple[str, str], str | None] = {}  # by side and name of a weight

    # -- facts ----------------------------------------------------------------------------------

    def facts(self) -> Iterator[Symptom]:
        """Yield the facts that differ; count the others."""
        for section in _FACTS:
            golden, mine = (dict(side.facts.get(section, {})) for side in self._sides)
            if golden and mine:
                found = list(self._section(section, golden, mine))
                yield from _together(found, len(golden)) if section == "modules" else found
            else:
                self._skip(section, max(len(golden), len(mine), 1))

    @property
    def _sides(self) -> tuple[Setup, Setup]:
        return self._golden, self._mine

    def _section(
        self, section: str, golden: dict[str, str], mine: dict[str, str]
    ) -> Iterator[Symptom]:
        for name in dict.fromkeys([*golden, *mine]):
            one, other = golden.get(name), mine.get(name)
            alone = one is None or other is None
            if alone and self._is_of_release(section, one or other or ""):
                self.not_compared[f"{section}: only one side has the setting"] += 1
                continue
            self.compared[section] += 1
            if one != other:
                yield _symptom(section, name, one or ABSENT, other or ABSENT)

    def _is_of_release(self, section: str, value: str) -> bool:
        """Tell whether a setting says nothing where the other side lacks it.

        Programs that write their settings leave out what is empty; other releases have others, and
        a checkpoint lists only what is no default.
        """
        kinds = {side.kind for side in self._sides}
        return section in ("versions", "switches", "random", "modules") or (
            section in ("config", "generation", "tokenizer")
            and (value in ("null", "[]", "{}", "", "false", "False") or "checkpoint" in kinds)
        )

    def _skip(self, section: str, count: int) -> None:
        for side in self._sides:
            if not side.facts.get(section):
                why = side.absent.get(section, setups.NOT_RECORDED)
                self.not_compared[f"{section} of {side.name}: {why}"] += count

    # -- weights --------------------------------------------------------------------------------

    def weights(self, progress: bool) -> Iterator[Symptom]:
        """Yield the weights that differ; count the others."""
        golden, mine = self._golden.weights, self._mine.weights
        if self._conversion and golden and mine:
            yield from self._converted(self._conversion, progress)
            return
        if not golden or not mine:
            for side in self._sides:
                if not side.weights:
                    why = side.absent.get("weights", setups.NOT_RECORDED)
                    self.not_compared[f"weights of {side.name}: {why}"] += 1
            return
        both = [name for name in golden if name in mine]
        bar = progress_bar(both, desc="weights", unit="tensor", shown=progress)
        found = [each for name in bar for each in self._weight(name, golden[name], mine[name])]
        yield from _together(found, len(both))
        yield from self._unpaired(
            {name: w for name, w in golden.items() if name not in mine},
            {name: w for name, w in mine.items() if name not in golden},
        )
        yield from self._tied()

    def _converted(self, conversion: Conversion, progress: bool) -> Iterator[Symptom]:
        """Yield what a GGUF file makes of the weights of a checkpoint."""
        found = [
            _symptom("weights", name, *(texts[::-1] if self._turned else texts))
            for name, *texts in conversion.found(progress)
        ]
        self.compared["weights"] += conversion.compared
        self.not_compared.update(conversion.not_compared)
        yield from _together(found, conversion.compared)

    def _weight(self, name: str, golden: Weight, mine: Weight) -> Iterator[Symptom]:
        self.compared["weights"] += 1
        if golden.shape != mine.shape:
            texts = [f"{w.dtype} {list(w.shape)}" for w in (golden, mine)]
            yield _symptom("weights", f"shape of {name}", *texts)
            return
        if golden.dtype != mine.dtype:
            yield from self._other_dtype(name, golden, mine)
            return
        contents = self._content(self._golden, name), self._content(self._mine, name)
        equal = same(*contents)
        if equal is None:
            self._unknown(name)
        elif not equal:
            yield _symptom("weights", f"values of {name}", *_values(golden, mine, contents))

    def _other_dtype(self, name: str, golden: Weight, mine: Weight) -> Iterator[Symptom]:
        yield _symptom("weights", f"dtype of {name}", golden.dtype, mine.dtype)
        one, other = setups.value_of(golden), setups.value_of(mine)
        narrow = DTYPES.get(coarsest((golden.dtype, mine.dtype)) or "")
        if one is None or other is None or narrow is None:
            self._unknown(name)
        elif not torch.equal(one.cpu().to(narrow), other.cpu().to(narrow)):
            yield _symptom("weights", f"values of {name}", *_values(golden, mine, (None, None)))

    def _content(self, side: Setup, name: str) -> str | None:
        """Return the fingerprint of a weight."""
        key = "golden" if side is self._golden else "mine", name
        if key not in self._contents:
            self._contents[key] = setups.content_of(side.weights[name])
        return self._contents[key]

    def _unknown(self, name: str) -> None:
        self.compared["weights"] -= 1
        self.not_compared["weights: the values of one side are unknown"] += 1

    def _unpaired(self, golden: dict[str, Weight], mine: dict[str, Weight]) -> Iterator[Symptom]:
        """Yield what only one side has, and is neither tied, renamed, computed nor unrecorded."""
        self._drop_renamed(golden, mine)
        self._drop_joined(golden, mine)
        self._drop_joined(mine, golden)
        for has, lacks, names, which in (
            (self._golden, self._mine, golden, 0), (self._mine, self._golden, mine, 1),
        ):  # fmt: skip
            left = []
            for name, weight in names.items():
                if why := self._excuse(name, weight, has, lacks):
                    self.not_compared[f"weights: {why}"] += 1
                else:
                    left.append(name)
            if left:
                self.compared["weights"] += len(left)
                yield _only_in(has, lacks, left, which)

    def _excuse(self, name: str, weight: Weight, has: Setup, lacks: Setup) -> str:
        """Return why it means nothing that a side lacks a weight; "" if it does."""
        if not weight.saved and lacks.kind != "model":
            return "buffers that are computed, not saved"
        for group in (*has.ties, *lacks.ties):
            if name in group and any(other in lacks.weights for other in group - {name}):
                return TIED
        if len(weight.shape) > 1 and self._content(has, name) in self._shared(has, lacks):
            return TIED
        if lacks.partial:
            return lacks.partial
        if lacks.kind == "checkpoint" and has.kind == "run" and len(weight.shape) < 2:
            return "vectors that only a run has: they may be buffers, which are not saved"
        return ""

    def _shared(self, has: Setup, lacks: Setup) -> set[str | None]:
        """Return the fingerprints of the weights of a side that both have."""
        names = has.weights.keys() & lacks.weights.keys()
        return {self._content(has, name) for name in names} - {None}

    def _drop_renamed(self, golden: dict[str, Weight], mine: dict[str, Weight]) -> None:
        """Take out what has the same values under another name."""
        names: dict[str, list[str]] = defaultdict(list)
        for name in mine:
            if golden and (content := self._content(self._mine, name)):
                names[content].append(name)
        for name in list(golden):
            found = names.get(self._content(self._golden, name) or "") if names else None
            if found:
                del golden[name], mine[found.pop(0)]
                self.compared["weights"] += 1

    def _drop_joined(self, parts: dict[str, Weight], wholes: dict[str, Weight]) -> None:
        """Take out weights that lie one behind the other in one weight of the other side.

        Queries, keys and values do, or gate and up.
        """
        of_parent: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name in parts:
            parent, _, kind = name.rpartition(".")
            of_parent[parent.rpartition(".")[0], kind].append(name)
        for whole, weight in list(wholes.items()) if of_parent else ():
            value = setups.value_of(weight)
            for names in of_parent.values():
                still = {name: parts[name] for name in names if name in parts}
                found = () if value is None or whole not in wholes else _joined(still, value)
                for name in found:
                    del parts[name]
                if found:
                    del wholes[whole]
                    self.compared["weights"] += len(found)

    def _tied(self) -> Iterator[Symptom]:
        """Yield weights that are tied in one program alone: theirs differ in the other one."""
        for has, other in (self._sides, self._sides[::-1]):
            for group in has.ties:
                contents = {
                    self._content(other, name) for name in group if name in other.weights
                } - {None}
                if len(contents) > 1:
                    names = " = ".join(sorted(group))
                    texts = ["one weight", "different values"]
                    if has is self._mine:
                        texts.reverse()
                    yield _symptom("weights", f"tied {names}", *texts)


def _joined(parts: Mapping[str, Weight], whole: torch.Tensor) -> tuple[str, ...]:
    """Return the names of weights that make a whole one, one behind the other; () if none do."""
    every = list(parts)
    for count in range(2, constants.MOST_TURNS + 1):
        for names in (tuple(every[at : at + count]) for at in range(len(every) - count + 1)):
            sizes = [parts[name].shape for name in names]
            rows = sum(shape[0] if shape else 0 for shape in sizes)
            if (rows, *sizes[0][1:]) != tuple(whole.shape) or len({s[1:] for s in sizes}) > 1:
                continue
            values = [setups.value_of(parts[name]) for name in names]
            known = [value for value in values if value is not None and value.dtype == whole.dtype]
            if len(known) == count and torch.equal(torch.cat(known), whole):
                return names
    return ()


def _together(found: list[Symptom], total: int) -> Iterator[Symptom]:
    """Yield what was found of a section; if most differ in the same way, that is one symptom."""
    kinds: dict[str, list[Symptom]] = defaultdict(list)
    for each in found:
        kinds[each.name.partition(" of ")[0]].append(each)
    for kind, alike in kinds.items():
        if len(alike) <= max(_NAMES, total // 2):
            yield from alike
            continue
        names = ", ".join(each.name.removeprefix(f"{kind} of ") for each in alike[:_NAMES])
        section = alike[0].section
        where = f"{kind} of {len(alike):,} of {total:,} {section}: {names} …"
        yield _symptom(section, where, alike[0].golden, f"{alike[0].mine} (the first of them)")


def _only_in(has: Setup, lacks: Setup, names: list[str], which: int) -> Symptom:
    some = ", ".join(names[:_NAMES]) + (" …" if len(names) > _NAMES else "")
    what = "only in golden" if which == 0 else "only in mine"
    if {has.kind, lacks.kind} == {"model", "checkpoint"}:
        what = "unexpected keys" if has.kind == "checkpoint" else "missing keys"
        some += " (of the checkpoint)"
    texts = [f"{len(names):,}: {some}", "none of them"]
    if which:
        texts.reverse()
    return _symptom("weights", what, *texts)


def _values(
    golden: Weight, mine: Weight, contents: tuple[str | None, str | None]
) -> tuple[str, str]:
    """Return both values in words: by how much they differ, else by their fingerprints."""
    one, other = setups.value_of(golden), setups.value_of(mine)
    if one is None or other is None or not one.is_floating_point() or not other.is_floating_point():
        return contents[0] or golden.dtype, contents[1] or mine.dtype
    g, m = one.cpu().double().flatten(), other.cpu().double().flatten()
    size = float(g.norm())
    apart = float((m - g).norm()) / size if size else float("inf")
    count = int((g != m).sum())
    return (
        f"norm {size:.6g}",
        f"norm {float(m.norm()):.6g}; {count:,} of {g.numel():,} elements differ, relative L2"
        f" {apart:.3g}",
    )


def _symptom(section: str, name: str, golden: str, mine: str) -> Symptom:
    found = known(section, name)
    return Symptom(found.level, section, name, golden, mine, found.can, found.do)
