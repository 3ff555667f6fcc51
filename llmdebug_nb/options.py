"""Every option and its default, once. Front ends parse into these and pass them on unchanged."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from llmdebug_nb.errors import OptionError, nearest

TOKENS = "0-3"
RUNS_FOLDER = "llmdebug_runs"
PARTS = {"both": ("input", "output"), "in": ("input",), "out": ("output",), "input": ("input",), "output": ("output",)}
MODES = ("module",)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


def runs_folder() -> Path:
    """Return the folder in which runs are kept and looked up by name: ``$LLMDEBUG_RUNS``, else ./llmdebug_runs."""
    return Path(os.environ.get("LLMDEBUG_RUNS") or RUNS_FOLDER)


@dataclass(frozen=True, slots=True)
class TokenSet:
    """A set of step numbers: inclusive ranges, the last of which may be open (``hi`` None)."""

    ranges: tuple[tuple[int, int | None], ...]

    @classmethod
    def parse(cls, spec: str | int | Iterable[int] | None) -> TokenSet:
        """Read ``"0-3"``, ``"0,2,5-7"``, ``"4-"``, ``"all"``, a number, numbers, or None (all).

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
                raise OptionError(f"tokens {spec!r}: {part.strip()!r} is no step; write 0-3, 0,2,5-7, 4- or all")
            low = int(found[1])
            high = int(found[3]) if found[3] else None if found[2] else low
            if high is not None and high < low:
                raise OptionError(f"tokens {spec!r}: the range {part.strip()} runs backwards; write {high}-{low}")
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
            f"{low}-" if high is None else str(low) if low == high else f"{low}-{high}" for low, high in self.ranges
        )


def _names(value: Any, option: str) -> tuple[str, ...]:
    """Read a name, a comma list or a sequence of names."""
    if value is None:
        return ()
    items = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(item, str) and item.strip() for item in items):
        raise OptionError(f"{option} {value!r}: expected a name or a glob, or several of them")
    return tuple(item.strip() for item in items)


def _types(value: Any) -> tuple[type | str, ...]:
    """Read a module class, its name, or several of either."""
    if value is None:
        return ()
    if isinstance(value, str):
        return _names(value, "types")
    items = [value] if isinstance(value, type) or not isinstance(value, Iterable) else list(value)
    for item in items:
        if not isinstance(item, (type, str)):
            raise OptionError(f"types {value!r}: {item!r} is neither a module class nor the name of one")
    return tuple(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """What to record and where to put it.

    ``name``: of the run; letters, digits, ``_ . -``. ``path``: folder that will hold it (default: `runs_folder`).
    ``tokens``: steps of each generation, see `TokenSet.parse`. ``mode``: module.
    ``part``: in | out | both. ``layers``: glob(s) over the module path. ``types``: module class(es) or their names.
    ``stats_only``: summaries without payload. ``seed``: seed Python, NumPy and torch before the block.
    ``warmup``: so many generations (or, outside `generate`, bare calls) at the start are warm-ups.
    """

    name: str = "run"
    path: str | os.PathLike[str] | None = None
    tokens: Any = TOKENS
    mode: str = "module"
    part: str = "both"
    layers: Any = None
    types: Any = None
    stats_only: bool = False
    seed: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise OptionError(
                f"name {self.name!r}: use up to 100 letters, digits and _ . - (first one a letter, digit or _)"
            )
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise OptionError(f"mode {self.mode!r} is not known; known: {', '.join(MODES)}")
        if not isinstance(self.part, str) or self.part not in PARTS:
            raise OptionError(f"part {self.part!r} is not known; known: in, out, both")
        if self.path is not None and not isinstance(self.path, (str, os.PathLike)):
            raise OptionError(f"path {self.path!r}: expected the folder that will hold the run")
        if self.seed is not None and (not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32):
            raise OptionError(f"seed {self.seed!r}: expected a whole number from 0 to 2**32 - 1")
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise OptionError(f"warmup {self.warmup!r}: expected how many generations to count as warm-up, 0 or more")
        for option, value in (
            ("tokens", TokenSet.parse(self.tokens)),
            ("layers", _names(self.layers, "layers")),
            ("types", _types(self.types)),
            ("seed", None if self.seed is None else int(self.seed)),
        ):
            object.__setattr__(self, option, value)

    @classmethod
    def of(cls, **given: Any) -> DumpOptions:
        """Build from keyword arguments; an unknown one is an OptionError that names the nearest."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(f"option {name!r} is not known{nearest(name, known)}")
        return cls(**given)

    @property
    def roles(self) -> tuple[str, ...]:
        return PARTS[self.part]

    def as_json(self) -> dict[str, Any]:
        """Return what a dump remembers of its options."""
        types = [t if isinstance(t, str) else t.__name__ for t in self.types]
        return {
            "name": self.name,
            "tokens": str(self.tokens),
            "mode": self.mode,
            "part": self.part,
            "layers": list(self.layers),
            "types": types,
            "stats_only": self.stats_only,
            "seed": self.seed,
            "warmup": self.warmup,
        }


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """``explain``: look for what is to blame. ``progress``: show a progress bar when it takes a while."""

    explain: bool = True
    progress: bool = True


_LATER = {
    "analyze": (False, "a csv of statistics: use run.to_pandas().to_csv(path)"),
    "api_list": (None, "operator level"),
    "dump_last_logits": (False, "logits only: use layers='lm_head', part='out'"),
    "dump_weight": (False, "weights"),
}


class DumpConfig:
    """The parameters of `msit_llm.DumpConfig`, for the same capture (contract: msit 8.2 `dump/torch_dump`).

    An ordinary object: as many as you like, each with its own values. Differences to upstream are
    errors that say so, never a silent change: parameters that this version does not carry out are refused.

    Raises:
        OptionError: a value upstream refuses, or one not supported here.
    """

    def __init__(
        self,
        dump_path: str | os.PathLike[str] | None = None,
        token_range: list[int] | None = None,
        analyze: bool = False,
        module_list: list[type] | None = None,
        api_list: list[Any] | None = None,
        tensor_part: int = 2,
        device_id: int | None = None,
        dump_statistics_mode: int = 0,
        dump_last_logits: bool = False,
        mode: str | list[str] | None = None,
        dump_weight: bool = False,
        layer_name: str | None = None,
        seed: int | None = None,
        name: str = "msit_dump",
    ) -> None:
        given = {
            "analyze": analyze,
            "api_list": api_list,
            "dump_last_logits": dump_last_logits,
            "dump_weight": dump_weight,
        }
        for option, (default, instead) in _LATER.items():
            if given[option] not in (default, None, []):
                raise OptionError(f"DumpConfig({option}=…) is not supported in this version ({instead})")
        if token_range is not None and not isinstance(token_range, (list, tuple, range)):
            raise OptionError(f"token_range {token_range!r}: expected a list of token numbers such as [0, 1]")
        if tensor_part not in (0, 1, 2):
            raise OptionError(f"tensor_part {tensor_part!r}: expected 0 (inputs), 1 (outputs) or 2 (both)")
        if dump_statistics_mode not in (0, 1, 2):
            raise OptionError(f"dump_statistics_mode {dump_statistics_mode!r}: expected 0, 1 (statistics only) or 2")
        if device_id is not None and not isinstance(device_id, int):
            raise OptionError(f"device_id {device_id!r}: expected the number of a device")
        modes = [mode] if isinstance(mode, str) else list(mode or ["module"])
        if modes != ["module"]:
            raise OptionError(f"mode {mode!r} is not known; known: {', '.join(MODES)}")
        self.device_id = device_id
        self.options = DumpOptions(
            name=name,
            path=dump_path if dump_path is not None else "./",
            tokens=list(token_range) if token_range else [0],
            part=("in", "out", "both")[tensor_part],
            layers=None if layer_name is None else [layer_name],
            types=module_list or None,
            stats_only=dump_statistics_mode == 1,
            seed=seed,
        )
