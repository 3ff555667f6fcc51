"""Every option and its default, once. Front ends parse into these and pass them on unchanged."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from llmdebug_nb.errors import OptionError, nearest
from llmdebug_nb.rounds import Rounds

TOKENS = "0-3"
RUNS_FOLDER = "llmdebug_runs"
PARTS = {"both": ("input", "output"), "in": ("input",), "out": ("output",), "input": ("input",), "output": ("output",)}
PHASES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}
MODES = ("module", "api", "aten")
GRAPHS = ("fx", "fused", "both")
PROFILES = ("op", "kernel", "host", "tiling")
FINGERPRINTS = ("xxh3", "crc32", "xor")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_ID = re.compile(r"\d{1,9}(_\d{1,9})*(\.\d{1,9})?|\.\d{1,9}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


def runs_folder() -> Path:
    """Return the folder in which runs are kept and looked up by name: ``$LLMDEBUG_RUNS``, else ./llmdebug_runs."""
    return Path(os.environ.get("LLMDEBUG_RUNS") or RUNS_FOLDER)


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
                raise OptionError(f"{option} {spec!r}: {part.strip()!r} is no number; write 0-3, 0,2,5-7, 4- or all")
            low = int(found[1])
            high = int(found[3]) if found[3] else None if found[2] else low
            if high is not None and high < low:
                raise OptionError(f"{option} {spec!r}: the range {part.strip()} runs backwards; write {high}-{low}")
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


def _apis(value: Any) -> tuple[str, ...]:
    """Read names, globs and functions of operators, ``!`` in front of those to leave out, or a YAML file of them."""
    if isinstance(value, (str, os.PathLike)) and str(value).endswith((".yaml", ".yml")):
        return _apis_in(Path(value))
    items = [value] if callable(value) else value
    if isinstance(items, (list, tuple, set, frozenset)):
        items = [getattr(item, "__name__", item) for item in items]
    return _names(items, "apis")


def _apis_in(path: Path) -> tuple[str, ...]:
    import yaml

    expected = f"expected a YAML file with lists `include` and `exclude`, as in {path.name}: include: [linear, 'soft*']"
    try:
        lists = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"apis {str(path)!r}: {str(error).partition(chr(10))[0]}; {expected}") from None
    if not isinstance(lists, dict) or not lists.keys() <= {"include", "exclude"}:
        raise OptionError(f"apis {str(path)!r}: {expected}")
    return (*_names(lists.get("include"), "include"), *("!" + n for n in _names(lists.get("exclude"), "exclude")))


def _scope(value: Any) -> tuple[str, ...]:
    names = _names(value, "scope")
    if len(names) not in (0, 2):
        raise OptionError(f"scope {value!r}: expected two full names, of the first and the last call")
    return names


def execution_ids(value: Any) -> tuple[str, ...]:
    """Read ``"2,3_1"``, a number, or several of either; None is none. Raises OptionError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        value = str(value)
    ids = _names(value, "ids")
    for one in ids:
        if not _ID.fullmatch(one):
            raise OptionError(
                f"ids {one!r}: expected execution ids such as 2, 3_1 or 3_1.4, several as 2,3_1; llmdebug topology RUN shows them"
            )
    return ids


def _slice(value: Any) -> str | None:
    """Check an index such as ``0, :, -4:``: whole numbers, slices and one ``...``."""
    if value is None:
        return None
    items = [item.strip() for item in str(value).strip("[] ").split(",")]
    one = re.compile(r"\.\.\.|-?\d+|(-?\d+)?\s*:\s*(-?\d+)?(\s*:\s*([1-9]\d*)?)?")
    if not all(one.fullmatch(item) for item in items) or items.count("...") > 1:
        raise OptionError(f"slice {value!r}: expected an index such as '0, :, -4:' or '..., :8'")
    return ",".join(item.replace(" ", "") for item in items)


def _reduce(value: Any) -> str | None:
    """Check ``minmax`` or ``quantile`` with the number of points, 2 to 10,001: ``quantile:101``."""
    if value is None or value == "minmax":
        return value  # type: ignore[no-any-return]
    found = re.fullmatch(r"quantiles?(?::(\d{1,5}))?", str(value))
    count = int(found[1] or 101) if found else 0
    if not 2 <= count <= 10_001:
        raise OptionError(f"reduce {value!r} is not known; known: minmax, quantile:N with N from 2 to 10001 points")
    return f"quantile:{count}"


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


def _modes(value: Any) -> tuple[str, ...]:
    """Read one level or several (``"module+aten"``, ``"api,aten"``, a list), in the order of `MODES`."""
    items = re.split(r"[+,]", value) if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    wanted = [item.strip() if isinstance(item, str) else item for item in items]
    unknown = next((item for item in wanted if item not in MODES), None)
    if unknown is not None or not wanted:
        raise OptionError(f"mode {value!r} is not known; known: {', '.join(MODES)}, or several as in module+aten")
    return tuple(mode for mode in MODES if mode in wanted)


def _profile(value: Any) -> tuple[str, ...]:
    """Read one table or several (``"op+kernel"``, ``"host,kernel"``, a list), in the order of `PROFILES`; None is none."""
    if value is None or value == ():
        return ()
    items = re.split(r"[+,]", value) if isinstance(value, str) else value if isinstance(value, Iterable) else [value]
    wanted = [item.strip() if isinstance(item, str) else item for item in items]
    if not wanted or not all(item in PROFILES for item in wanted):
        known = ", ".join(PROFILES)
        raise OptionError(f"profile {value!r} is not known; known: {known}, or several as in op+kernel")
    return tuple(one for one in PROFILES if one in wanted)


def _one_of(value: Any, known: Iterable[str], option: str) -> str:
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
        raise OptionError(f"{option} {value!r}: expected a device such as cpu, cuda0 or npu1, or the number of one")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """What to record and where to put it.

    Where: ``name`` of the run; letters, digits, ``_ . -``. ``path``: folder that will hold it (default: `runs_folder`).

    When: ``tokens``: steps of each generation, see `TokenSet.parse`. ``rounds``: in their place, msit's rounds, see `Rounds.parse`. ``ranks``: the same for the ranks of a
    distributed job (None: all). ``warmup``: so many generations (or, outside `generate`, bare calls) at the start
    are warm-ups. ``control``: a JSON file that is read again whenever it changes and can switch recording on and
    off, see `capture/control.py`.

    What: ``mode``: any of module, api (functions and tensor methods), aten (dispatcher), joined by ``+``.
    ``phase``: forward | backward | both. ``part``: in | out | both. ``layers``: glob(s) over the module path; an
    operator counts with the modules that it runs in. ``opname``: modules and operators whose class or name begins with this text, or one of
    these, in any case. ``device``: only models on this device: ``cpu``, ``cuda0``, or the number of an accelerator. ``types``: module class(es) or their names. ``apis``: for
    operators: names, globs or functions, those with ``!`` in front left out; or a YAML file with lists ``include``
    and ``exclude``. ``contains``: only calls whose full name (``Functional.linear.0.forward``,
    ``Module.model.norm.LlamaRMSNorm.forward.0``) holds one of these texts. ``scope``: only calls between the two
    with these full names, both included. ``ids``: only calls with these execution ids (``"2,3_1"``, see `store.run.Run.ids`), and with
    ``children`` what lies below them. ``weights``: also the parameters, once. ``logits``: only the last logits
    of each step. ``time``: when inputs and outputs are looked at: 0 before the call (inputs alone), 1 after it (both, inputs as the
    call has left them), 2 inputs at both times, those after it in the role ``after``, 3 inputs before and outputs after.

    How much of each tensor: ``stats_only``: summaries without payload. ``slice``: a part of it, written as an
    index: ``"0, :, -1"``. ``reduce``: ``minmax`` or ``quantile[:N]`` in its place. ``max_bytes``: stop keeping
    payloads beyond so many bytes. ``overflow``: only calls with NaN or infinity in them, and at most so many
    (0: any number). ``fingerprint``: xxh3 | crc32 | xor. ``sources``: note the source line of each operator.

    ``seed``: seed Python, NumPy and torch before the block. ``force_eager``: run what `torch.compile` compiled
    eagerly in the steps that are recorded, in place of refusing it.

    ``graph``: compile the model with `torch.compile` and record what the compiled code computes: ``fx``, every node of the graph,
    run one by one; ``fused``, every buffer that Inductor's kernels write; ``both``, that, and beside it a run ``NAME.fx`` of the
    graph that the kernels were made of, node by node on the same inputs. ``fusion_switch``: which fusions are off, a JSON file or the
    mapping in it, see `capture/fusion.py`. ``compiler_config``: settings of Inductor by name.

    ``profile``: tables of times beside the tensors, any of ``op`` (what each call was given and gave, which every dump has, and dtypes and shapes of what kernels were given), ``kernel`` (the kernels that each
    operator launched), ``host`` (how long modules and operators kept the host, and gaps between operators) and ``tiling`` (launch
    configurations of fused kernels; with ``graph``), joined by ``+``.
    """

    name: str = "run"
    path: str | os.PathLike[str] | None = None
    tokens: Any = TOKENS
    rounds: Any = None
    ranks: Any = None
    warmup: int = 0
    control: str | os.PathLike[str] | None = None
    mode: Any = "module"
    phase: str = "both"
    part: str = "both"
    layers: Any = None
    types: Any = None
    opname: Any = None
    device: Any = None
    time: int = 3
    apis: Any = None
    contains: Any = None
    scope: Any = None
    ids: Any = None
    children: bool = True
    weights: bool = False
    logits: bool = False
    stats_only: bool = False
    slice: str | None = None
    reduce: str | None = None
    max_bytes: Any = None
    overflow: int | None = None
    fingerprint: str = "xxh3"
    sources: bool = True
    seed: int | None = None
    force_eager: bool = False
    graph: str | None = None
    fusion_switch: Any = None
    compiler_config: Mapping[str, Any] | None = None
    profile: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise OptionError(
                f"name {self.name!r}: use up to 100 letters, digits and _ . - (first one a letter, digit or _)"
            )
        for option in ("path", "control"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                what = "the folder that will hold the run" if option == "path" else "a JSON file"
                raise OptionError(f"{option} {value!r}: expected {what}")
        if self.seed is not None and (not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32):
            raise OptionError(f"seed {self.seed!r}: expected a whole number from 0 to 2**32 - 1")
        for option, what in (("warmup", "generations to count as warm-up"), ("overflow", "calls to record")):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise OptionError(f"{option} {value!r}: expected how many {what}, 0 or more")
        if not isinstance(self.children, bool):
            raise OptionError(f"children {self.children!r}: expected True or False")
        self._check_graph()
        self._check_time()
        if self.slice is not None and self.reduce is not None:
            raise OptionError("slice and reduce exclude each other: a payload is a part of the tensor or figures of it")
        for option, value in (
            ("tokens", TokenSet.parse(self.tokens)),
            ("rounds", None if self.rounds is None else Rounds.parse(self.rounds)),
            ("opname", tuple(name.lower() for name in _names(self.opname, "opname"))),
            ("device", None if self.device is None else device_name(self.device)),
            ("ranks", None if self.ranks is None else TokenSet.parse(self.ranks, "ranks")),
            ("mode", _modes(self.mode)),
            ("phase", _one_of(self.phase, PHASES, "phase")),
            ("part", _one_of(self.part, PARTS, "part")),
            ("fingerprint", _one_of(self.fingerprint, FINGERPRINTS, "fingerprint")),
            ("layers", _names(self.layers, "layers")),
            ("types", _types(self.types)),
            ("apis", _apis(self.apis)),
            ("contains", _names(self.contains, "contains")),
            ("scope", _scope(self.scope)),
            ("ids", execution_ids(self.ids)),
            ("slice", _slice(self.slice)),
            ("reduce", _reduce(self.reduce)),
            ("max_bytes", parse_bytes(self.max_bytes)),
            ("profile", _profile(self.profile)),
            ("seed", None if self.seed is None else int(self.seed)),
        ):
            object.__setattr__(self, option, value)

    def _check_time(self) -> None:
        if type(self.time) is not int or self.time not in range(4):
            raise OptionError(
                f"time {self.time!r}: expected 0 (before), 1 (after), 2 (both) or 3 (inputs before, outputs after)"
            )
        if self.time == 0 and PARTS.get(self.part) == ("output",):
            raise OptionError("time=0 and part='out' exclude each other: before a call there are no outputs")
        if self.graph is not None and self.time != 3:
            raise OptionError("time and graph exclude each other: nodes of a graph leave their inputs alone")
        if self.rounds is not None and str(self.tokens) != TOKENS:
            raise OptionError("rounds and tokens exclude each other: both say which steps are recorded")

    def _check_graph(self) -> None:
        if "tiling" in _profile(self.profile) and self.graph not in ("fused", "both"):
            raise OptionError(
                f"profile {self.profile!r}: tiling is of fused kernels, so say graph='fused', or 'both', as well"
            )
        if self.graph is None:
            for option in ("fusion_switch", "compiler_config"):
                if getattr(self, option) is not None:
                    raise OptionError(f"{option} is for compiled code: say graph='fused', or 'both', as well")
            return
        _one_of(self.graph, GRAPHS, "graph")
        if _modes(self.mode) != ("module",):
            raise OptionError(
                f"mode {self.mode!r}: of compiled code, graph={self.graph!r} says what is recorded; leave mode out"
            )
        for option in ("force_eager", "logits", "ids"):
            if getattr(self, option):
                raise OptionError(f"graph and {option} exclude each other")
        for option in ("fusion_switch", "compiler_config"):
            if self.graph == "fx" and getattr(self, option) is not None:
                raise OptionError(
                    f"{option} is for Inductor's kernels, and graph='fx' makes none: use 'fused' or 'both'"
                )
        if self.compiler_config is not None and not isinstance(self.compiler_config, Mapping):
            kind = type(self.compiler_config).__name__
            raise OptionError(
                f"compiler_config: expected a mapping of Inductor's settings, such as {{'max_fusion_size': 8}}, got {kind}"
            )

    @classmethod
    def of(cls, **given: Any) -> DumpOptions:
        """Build from keyword arguments; an unknown one is an OptionError that names the nearest."""
        known = cls.names()
        for name in given:
            if name not in known:
                raise OptionError(f"option {name!r} is not known{nearest(name, known)}")
        return cls(**given)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for role in PARTS[self.part] if not (self.time == 0 and role == "output"))

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[self.phase]

    @property
    def operators(self) -> bool:
        """Is anything below the modules asked for?"""
        return bool(self.mode != ("module",))

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, ready for JSON; `of` makes the same of them."""
        usual = type(self)()
        said = self.as_json() | {
            name: getattr(self, name) for name in ("path", "control", "fusion_switch", "compiler_config")
        }
        differing = {name: said[name] for name in said if getattr(self, name) != getattr(usual, name)}
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in differing.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Return what a dump remembers of its options: all but where it was put, and what watches it."""
        said: dict[str, Any] = {
            "tokens": str(self.tokens),
            "ranks": None if self.ranks is None else str(self.ranks),
            "mode": "+".join(self.mode),
            "profile": "+".join(self.profile) or None,
            "types": [t if isinstance(t, str) else t.__name__ for t in self.types],
            "rounds": None if self.rounds is None else str(self.rounds),
            **{name: list(getattr(self, name)) for name in ("layers", "opname", "apis", "contains", "scope", "ids")},
        }
        names = [name for name in self.names() if name not in ("path", "control")]
        said |= {
            name: value if value is None else str(value)
            for name in ("fusion_switch", "compiler_config")
            for value in [getattr(self, name)]
        }
        return {name: said.get(name, getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How two runs are compared.

    ``explain``: look for what is to blame. ``mapping``: which module of golden is which of mine, see `align.names.read`.
    ``limits``: fixed limits, a mapping or a YAML or JSON file, see
    `comparison/limits.py`. ``calibrate``: other recordings of golden (runs, names or paths; one or several): what they differ from it
    by is noise. ``metrics``: the user's, see `comparison/custom.py`. ``progress``: show a progress bar when it takes a while.
    """

    explain: bool = True
    mapping: Any = None
    limits: Any = None
    calibrate: Any = None
    metrics: Any = None
    progress: bool = True
