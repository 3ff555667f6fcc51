"""Readers of option values: each returns one canonical form, or raises a helpful OptionError.

A reader takes the value, and the name under which the user knows the option.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from llmdebug_nb.core.errors import OptionError, nearest

if TYPE_CHECKING:
    from llmdebug_nb.core.moments import Condition

MODES = ("module", "api", "aten")
PROFILES = ("op", "kernel", "host", "tiling")
_SIZES = {"": 1} | {
    prefix + binary: base ** (power + 1)
    for binary, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt")
}
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}"
# sections of msprobe's support_wrap_ops.yaml: ours, and those of the dispatcher and other libraries
_WRAPPED = {
    "functional": "Functional", "tensor": "Tensor", "torch": "Torch", "_VF": "VF",
    "distributed": "Distributed",
}  # fmt: skip
_NOT_HERE = frozenset(("aten", "torch_npu", "npu_distributed", "mindspeed"))
_TIMES = "0 (before), 1 (after), 2 (both) or 3 (inputs before, outputs after)"
# execution ids, also as msit counts them (core/part_ids.py)
_ID = r"(?:msit:)?\d{1,9}(_\d{1,9})*(\.\d{1,9})?|\.\d{1,9}"
_INDEX = r"\.\.\.|-?\d+|(-?\d+)?\s*:\s*(-?\d+)?(\s*:\s*([1-9]\d*)?)?"


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of step numbers: inclusive ranges, the last of which may be open (``hi`` None)."""

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, spec: object, option: str = "tokens") -> TokenSet:
        """Read ``"0-3"``, ``"0,2,5-7"``, ``"4-"``, ``"all"``, a number, several of these, or None.

        None means all steps.

        Raises:
            OptionError: anything else, an empty set, or a range that runs backwards.
        """
        if spec is None or spec == "all":
            return cls(((0, None),))
        parts = [str(spec)]
        if isinstance(spec, (range, list, tuple, set, frozenset)):
            parts = [str(item) for item in spec]
        ranges = []
        for part in ",".join(parts).split(","):
            match = re.fullmatch(r"\s*(\d{1,9})\s*(?:(-)\s*(\d{1,9})?)?\s*", part)
            if not match:
                raise OptionError(
                    f"{option} {spec!r}: {part.strip()!r} is neither a number nor a range;"
                    " write 0-3, 0,2,5-7, 4- or all"
                )
            low = int(match[1])
            high = int(match[3]) if match[3] else None if match[2] else low
            if high is not None and high < low:
                raise OptionError(
                    f"{option} {spec!r}: the range {part.strip()} runs backwards;"
                    f" write {high}-{low}"
                )
            ranges.append((low, high))
        return cls(tuple(sorted(ranges)))

    def __contains__(self, step: int) -> bool:
        return any(low <= step and (high is None or step <= high) for low, high in self.ranges)

    @property
    def last(self) -> int | None:
        """The highest step, or None if the set is open."""
        highs = [high for _, high in self.ranges]
        return None if None in highs else max(h for h in highs if h is not None)

    def __str__(self) -> str:
        return ",".join(
            f"{low}-" if high is None else str(low) if low == high else f"{low}-{high}"
            for low, high in self.ranges
        )


def names(value: object, option: str) -> tuple[str, ...]:
    """Read a name, several with commas, or a sequence of names; None is an empty tuple."""
    if value is None:
        return ()
    if isinstance(value, str):
        items: list[object] = [*value.split(",")]
    else:
        items = list(value) if isinstance(value, Iterable) else [value]
    texts = [item.strip() for item in items if isinstance(item, str) and item.strip()]
    if len(texts) != len(items):
        raise OptionError(f"{option} {value!r}: expected a name or a glob, or several of them")
    return tuple(texts)


def lower_names(value: object, option: str) -> tuple[str, ...]:
    """Read names, in lower case."""
    return tuple(name.lower() for name in names(value, option))


def apis(value: object, option: str = "apis") -> tuple[str, ...]:
    """Read names, globs and functions of operators, or a YAML file of them.

    A ``!`` in front of a name leaves the operator out.
    """
    if isinstance(value, (str, os.PathLike)) and str(value).endswith((".yaml", ".yml")):
        return _apis_in(Path(value), option)
    items = [value] if callable(value) else value
    if isinstance(items, (list, tuple, set, frozenset)):
        items = [getattr(item, "__name__", item) for item in items]
    return names(items, option)


def _apis_in(path: Path, option: str) -> tuple[str, ...]:
    import yaml

    expected = (
        "expected a YAML file with lists `include` and `exclude`,"
        f" as in {path.name}: include: [linear, 'soft*'], or msprobe's support_wrap_ops.yaml"
    )
    try:
        lists = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = str(error).partition("\n")[0]
        raise OptionError(f"{option} {str(path)!r}: {why}; {expected}") from None
    if isinstance(lists, dict) and lists and lists.keys() <= {*_WRAPPED, *_NOT_HERE}:
        return _wrapped(lists)
    if not isinstance(lists, dict) or not lists.keys() <= {"include", "exclude"}:
        raise OptionError(f"{option} {str(path)!r}: {expected}")
    excluded = names(lists.get("exclude"), "exclude")
    return (*names(lists.get("include"), "include"), *(f"!{name}" for name in excluded))


def _wrapped(lists: Mapping[str, object]) -> tuple[str, ...]:
    """Return the operators of msprobe's support_wrap_ops.yaml, with their sections as prefixes."""
    left_out = {
        section: len(names(lists[section], section)) for section in _NOT_HERE & lists.keys()
    }
    if any(left_out.values()):
        said = ", ".join(f"{section} ({count})" for section, count in sorted(left_out.items()))
        warnings.warn(f"operators of these sections do not run at this level: {said}", stacklevel=2)
    return tuple(
        f"{prefix}.{name}"
        for section, prefix in _WRAPPED.items()
        for name in names(lists.get(section), section)
    )


def scope(value: object, option: str = "scope") -> tuple[str, ...]:
    """Read the full names of a first and a last call."""
    ends = names(value, option)
    if len(ends) not in (0, 2):
        raise OptionError(
            f"{option} {value!r}: expected two full names, of the first and the last call"
        )
    return ends


def execution_ids(value: object, option: str = "ids") -> tuple[str, ...]:
    """Read ``"2,3_1"``, a number, or several of either; None is an empty tuple."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    ids = names(value, option)
    for each in ids:
        if not re.fullmatch(_ID, each):
            raise OptionError(
                f"{option} {each!r}: expected execution ids such as 2, 3_1 or 3_1.4,"
                " or as msit counts msit:3_1, several as 2,3_1; llmdebug topology RUN shows them"
            )
    return ids


def index(value: object, option: str = "slice") -> str | None:
    """Read an index such as ``0, :, -4:``: whole numbers, slices and one ``...``."""
    if value is None:
        return None
    items = [item.strip() for item in str(value).strip("[] ").split(",")]
    if not all(re.fullmatch(_INDEX, item) for item in items) or items.count("...") > 1:
        raise OptionError(f"{option} {value!r}: expected an index such as '0, :, -4:' or '..., :8'")
    return ",".join(item.replace(" ", "") for item in items)


def reduction(value: object, option: str = "reduce") -> str | None:
    """Read ``minmax``, or ``quantile`` with 2 to 10,001 points: ``quantile:101``."""
    if value is None or value == "minmax":
        return None if value is None else "minmax"
    match = re.fullmatch(r"quantiles?(?::(\d{1,5}))?", str(value))
    count = int(match[1] or 101) if match else 0
    if not 2 <= count <= 10_001:
        raise OptionError(
            f"{option} {value!r} is not known; known: minmax,"
            " quantile:N with N from 2 to 10001 points"
        )
    return f"quantile:{count}"


def types(value: object, option: str = "types") -> tuple[type | str, ...]:
    """Read a module class, its name, or several of either."""
    if value is None or isinstance(value, str):
        return names(value, option)
    items: list[type | str] = []
    for item in [value] if isinstance(value, type) or not isinstance(value, Iterable) else value:
        if not isinstance(item, (type, str)):
            raise OptionError(
                f"{option} {value!r}: {item!r} is neither a module class nor the name of one"
            )
        items.append(item)
    return tuple(items)


def modes(value: object, option: str = "mode") -> tuple[str, ...]:
    """Read one level or several (``"module+aten"``, ``"api,aten"``, a list), in `MODES`' order."""
    return _some_of(value, MODES, option, "module+aten")


def profiles(value: object, option: str = "profile") -> tuple[str, ...]:
    """Read one table or several (``"op+kernel"``, a list), in the order of `PROFILES`.

    None is an empty tuple.
    """
    if value is None or value == ():
        return ()
    return _some_of(value, PROFILES, option, "op+kernel")


def _some_of(value: object, known: tuple[str, ...], option: str, example: str) -> tuple[str, ...]:
    """Read one name or several of those known, and return them in the order of these."""
    wanted = _parts(value)
    if not wanted or not all(item in known for item in wanted):
        raise OptionError(
            f"{option} {value!r} is not known; known: {', '.join(known)},"
            f" or several as in {example}"
        )
    return tuple(name for name in known if name in wanted)


def _parts(value: object) -> list[object]:
    """Return the items of a text with ``+`` or commas, or of a sequence."""
    if isinstance(value, str):
        return [item.strip() for item in re.split(r"[+,]", value)]
    if not isinstance(value, Iterable):
        return [value]
    return [item.strip() if isinstance(item, str) else item for item in value]


def one_of(value: object, known: Iterable[str], option: str) -> str:
    """Check that a text is one of those known."""
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"{option} {value!r} is not known; known: {', '.join(known)}")
    return value


def some_of(value: str | Iterable[str], known: Iterable[str], option: str) -> list[str]:
    """Return which of the known texts are named, in their own order."""
    chosen = value.replace(",", " ").split() if isinstance(value, str) else list(value)
    for each in chosen:
        if each not in known:
            raise OptionError(f"{option}: {each!r} is not known{nearest(str(each), known)}")
    return [each for each in known if each in chosen]


def flag(value: object, option: str) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise OptionError(f"{option} {value!r}: expected True or False")
    return value


def seed(value: object, option: str = "seed") -> int:
    """Check a seed that Python, NumPy and torch all take."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1
    if not 0 <= number < 2**32:
        raise OptionError(f"{option} {value!r}: expected a whole number from 0 to 2**32 - 1")
    return number


def device_name(value: object, option: str = "device") -> str:
    """Read a device as the folders of a dump name it: ``cpu``, ``cuda0``, ``npu1``, or a number.

    Raises:
        OptionError: anything else.
    """
    text = str(value).strip().lower().replace(":", "")
    if isinstance(value, bool) or not re.fullmatch(r"[a-z]*\d{0,4}", text) or not text:
        raise OptionError(
            f"{option} {value!r}: expected a device such as cpu, cuda0 or npu1,"
            " or the number of one"
        )
    return text


def parse_bytes(value: object, option: str = "max_bytes") -> int | None:
    """Read a number of bytes: ``2_000_000``, ``"500MB"``, ``"2 GiB"``; None is None.

    Raises:
        OptionError: anything else, or less than one byte.
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([kmgt]i?)?b?\s*", str(value).lower())
    size = int(float(match[1].replace("_", "")) * _SIZES[match[2] or ""]) if match else 0
    if size < 1 or isinstance(value, bool):
        raise OptionError(f"{option} {value!r}: expected a number of bytes such as 500MB or 2GiB")
    return size


def name(value: object, option: str) -> str:
    """Check the name of a run."""
    if not isinstance(value, str) or not re.fullmatch(_NAME, value):
        raise OptionError(
            f"{option} {value!r}: use up to 100 letters, digits and _ . -"
            " (first one a letter, digit or _)"
        )
    return value


def path(expected: str) -> Callable[[object, str], object]:
    """Return a reader that accepts a path or None."""

    def check(value: object, option: str) -> object:
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise OptionError(f"{option} {value!r}: expected {expected}")
        return value

    return check


def count(of: str) -> Callable[[object, str], object]:
    """Return a reader that accepts None or a number from 0 on."""

    def check(value: object, option: str) -> object:
        if value is not None and (not isinstance(value, int) or value < 0):
            raise OptionError(f"{option} {value!r}: expected how many {of}, 0 or more")
        return value

    return check


def positive(of: str) -> Callable[[object, str], object]:
    """Return a reader that accepts None or a number from 1 on."""

    def check(value: object, option: str) -> object:
        if value is not None and (type(value) is not int or value < 1):
            raise OptionError(f"{option} {value!r}: expected how many {of}, 1 or more")
        return value

    return check


def alarms(value: object, option: str) -> tuple[str | Condition, ...]:
    """Read what raises an alarm: names with commas, functions of a `Moment`, or several."""
    items = [value] if callable(value) else value
    if isinstance(items, (list, tuple)):
        return tuple(each for item in items for each in _alarms(item, option))
    return () if items is None else _alarms(items, option)


def _alarms(item: object, option: str) -> tuple[str | Condition, ...]:
    if callable(item):
        return (item,)
    found = names(item, option) if isinstance(item, str) and item.strip() else (str(item),)
    for each in found:
        spread = re.fullmatch(r"spike(?::(\d{1,6}(?:\.\d{1,6})?))?", each)
        if each != "nan" and not (spread and float(spread[1] or 1) > 0):
            raise OptionError(
                f"{option} {each!r}: expected nan, spike, spike:8 (standard deviations), or in"
                " Python a function of a moment, such as lambda moment: moment.loss > 20"
            )
    return found


def time(value: object, option: str) -> object:
    """Check the number that says when inputs and outputs are read."""
    if type(value) is not int or value not in range(4):
        raise OptionError(f"{option} {value!r}: expected {_TIMES}")
    return value


def compiler_config(value: object, option: str) -> object:
    """Check that settings are a mapping, or None."""
    if value is not None and not isinstance(value, Mapping):
        raise OptionError(
            f"{option}: expected a mapping of Inductor's settings, such as"
            f" {{'max_fusion_size': 8}}, got {type(value).__name__}"
        )
    return value


def among(known: Iterable[str]) -> Callable[[object, str], object]:
    """Return a reader that accepts one of these texts."""
    return lambda value, option: one_of(value, known, option)


def unless_none(reader: Callable[[object, str], object]) -> Callable[[object, str], object]:
    """Return a reader that leaves None as it is."""
    return lambda value, option: None if value is None else reader(value, option)
