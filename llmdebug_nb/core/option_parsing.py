"""How the values of options are written: each reader gives one form, and refuses what it can't read with what would do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdebug_nb.core.errors import OptionError

MODES = ("module", "api", "aten")
PROFILES = ("op", "kernel", "host", "tiling")
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_ID = re.compile(r"\d{1,9}(_\d{1,9})*(\.\d{1,9})?|\.\d{1,9}")


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of step numbers: inclusive ranges, the last of which may be open (``hi`` None)."""

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, spec: Any, option: str = "tokens") -> TokenSet:
        """Read ``"0-3"``, ``"0,2,5-7"``, ``"4-"``, ``"all"``, a number, numbers or texts like these, or None (all).

        Raises:
            OptionError: anything else, an empty set, or a range that runs backwards.
        """
        if spec is None or spec == "all":
            return cls(((0, None),))
        if isinstance(spec, (range, list, tuple, set, frozenset)):
            spec = ",".join(str(item) for item in spec)
        ranges = []
        for part in str(spec).split(","):
            found = re.fullmatch(r"\s*(\d{1,9})\s*(?:(-)\s*(\d{1,9})?)?\s*", part)
            if not found:
                raise OptionError(
                    f"{option} {spec!r}: {part.strip()!r} is no number; write 0-3, 0,2,5-7, 4- or all"
                )
            low = int(found[1])
            high = int(found[3]) if found[3] else None if found[2] else low
            if high is not None and high < low:
                raise OptionError(
                    f"{option} {spec!r}: the range {part.strip()} runs backwards; write {high}-{low}"
                )
            ranges.append((low, high))
        return cls(tuple(sorted(ranges)))

    def __contains__(self, step: int) -> bool:
        return any(low <= step and (high is None or step <= high) for low, high in self.ranges)

    @property
    def last(self) -> int | None:
        """The highest step, or None when open."""
        highs = [high for _, high in self.ranges]
        return None if None in highs else max(h for h in highs if h is not None)

    def __str__(self) -> str:
        return ",".join(
            f"{low}-" if high is None else str(low) if low == high else f"{low}-{high}"
            for low, high in self.ranges
        )


def names(value: Any, option: str) -> tuple[str, ...]:
    """Read a name, a comma list or a sequence of names."""
    if value is None:
        return ()
    items = (
        value.split(",")
        if isinstance(value, str)
        else list(value)
        if isinstance(value, Iterable)
        else [value]
    )
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise OptionError(f"{option} {value!r}: expected a name or a glob, or several of them")
    return tuple(item.strip() for item in items)


def apis(value: Any) -> tuple[str, ...]:
    """Read names, globs and functions of operators, ``!`` in front of those to leave out, or a YAML file of them."""
    if isinstance(value, (str, os.PathLike)) and str(value).endswith((".yaml", ".yml")):
        return _apis_in(Path(value))
    items = [value] if callable(value) else value
    if isinstance(items, (list, tuple, set, frozenset)):
        items = [getattr(item, "__name__", item) for item in items]
    return names(items, "apis")


def _apis_in(path: Path) -> tuple[str, ...]:
    import yaml

    expected = f"expected a YAML file with lists `include` and `exclude`, as in {path.name}: include: [linear, 'soft*']"
    try:
        lists = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(
            f"apis {str(path)!r}: {str(error).partition(chr(10))[0]}; {expected}"
        ) from None
    if not isinstance(lists, dict) or not lists.keys() <= {"include", "exclude"}:
        raise OptionError(f"apis {str(path)!r}: {expected}")
    return (
        *names(lists.get("include"), "include"),
        *("!" + n for n in names(lists.get("exclude"), "exclude")),
    )


def scope(value: Any) -> tuple[str, ...]:
    ends = names(value, "scope")
    if len(ends) not in (0, 2):
        raise OptionError(
            f"scope {value!r}: expected two full names, of the first and the last call"
        )
    return ends


def execution_ids(value: Any) -> tuple[str, ...]:
    """Read ``"2,3_1"``, a number, or several of either; None is none. Raises OptionError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        value = str(value)
    ids = names(value, "ids")
    for one in ids:
        if not _ID.fullmatch(one):
            raise OptionError(
                f"ids {one!r}: expected execution ids such as 2, 3_1 or 3_1.4, several as 2,3_1; llmdebug topology RUN shows them"
            )
    return ids


def index(value: Any) -> str | None:
    """Check an index such as ``0, :, -4:``: whole numbers, slices and one ``...``."""
    if value is None:
        return None
    items = [item.strip() for item in str(value).strip("[] ").split(",")]
    one = re.compile(r"\.\.\.|-?\d+|(-?\d+)?\s*:\s*(-?\d+)?(\s*:\s*([1-9]\d*)?)?")
    if not all(one.fullmatch(item) for item in items) or items.count("...") > 1:
        raise OptionError(f"slice {value!r}: expected an index such as '0, :, -4:' or '..., :8'")
    return ",".join(item.replace(" ", "") for item in items)


def reduction(value: Any) -> str | None:
    """Check ``minmax`` or ``quantile`` with the number of points, 2 to 10,001: ``quantile:101``."""
    if value is None or value == "minmax":
        return value  # type: ignore[no-any-return]
    found = re.fullmatch(r"quantiles?(?::(\d{1,5}))?", str(value))
    count = int(found[1] or 101) if found else 0
    if not 2 <= count <= 10_001:
        raise OptionError(
            f"reduce {value!r} is not known; known: minmax, quantile:N with N from 2 to 10001 points"
        )
    return f"quantile:{count}"


def types(value: Any) -> tuple[type | str, ...]:
    """Read a module class, its name, or several of either."""
    if value is None:
        return ()
    if isinstance(value, str):
        return names(value, "types")
    items = [value] if isinstance(value, type) or not isinstance(value, Iterable) else list(value)
    for item in items:
        if not isinstance(item, (type, str)):
            raise OptionError(
                f"types {value!r}: {item!r} is neither a module class nor the name of one"
            )
    return tuple(items)


def modes(value: Any) -> tuple[str, ...]:
    """Read one level or several (``"module+aten"``, ``"api,aten"``, a list), in the order of `MODES`."""
    items = (
        re.split(r"[+,]", value)
        if isinstance(value, str)
        else list(value)
        if isinstance(value, Iterable)
        else []
    )
    wanted = [item.strip() if isinstance(item, str) else item for item in items]
    unknown = next((item for item in wanted if item not in MODES), None)
    if unknown is not None or not wanted:
        raise OptionError(
            f"mode {value!r} is not known; known: {', '.join(MODES)}, or several as in module+aten"
        )
    return tuple(mode for mode in MODES if mode in wanted)


def profiles(value: Any) -> tuple[str, ...]:
    """Read one table or several (``"op+kernel"``, ``"host,kernel"``, a list), in the order of `PROFILES`; None is none."""
    if value is None or value == ():
        return ()
    items = (
        re.split(r"[+,]", value)
        if isinstance(value, str)
        else value
        if isinstance(value, Iterable)
        else [value]
    )
    wanted = [item.strip() if isinstance(item, str) else item for item in items]
    if not wanted or not all(item in PROFILES for item in wanted):
        known = ", ".join(PROFILES)
        raise OptionError(
            f"profile {value!r} is not known; known: {known}, or several as in op+kernel"
        )
    return tuple(one for one in PROFILES if one in wanted)


def one_of(value: Any, known: Iterable[str], option: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"{option} {value!r} is not known; known: {', '.join(known)}")
    return value


def device_name(value: Any, option: str = "device") -> str:
    """Read the name of a device as a dump's folder has it: ``cpu``, ``cuda0``, ``npu1``; or the number of an accelerator.

    Raises:
        OptionError: anything else.
    """
    text = str(value).strip().lower().replace(":", "")
    if isinstance(value, bool) or not re.fullmatch(r"[a-z]*\d{0,4}", text) or not text:
        raise OptionError(
            f"{option} {value!r}: expected a device such as cpu, cuda0 or npu1, or the number of one"
        )
    return text


def parse_bytes(value: Any, option: str = "max_bytes") -> int | None:
    """Read a number of bytes: ``2_000_000``, ``"500MB"``, ``"2 GiB"``; None is none.

    Raises:
        OptionError: anything else, or less than one byte.
    """
    if value is None:
        return None
    found = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([kmgt]i?)?b?\s*", str(value).lower())
    size = int(float(found[1].replace("_", "")) * _UNITS[found[2] or ""]) if found else 0
    if size < 1 or isinstance(value, bool):
        raise OptionError(f"{option} {value!r}: expected a number of bytes such as 500MB or 2GiB")
    return size
