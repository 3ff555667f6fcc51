"""The options of a recording: each is declared once, on `DumpOptions`.

Its declaration holds the default, the help text, the flags of the command line and the magic, how
its value is read, and how a dump stores it. Command line, magic, docstrings and signatures are
made from that. `DumpKeywords` has the types that type checkers and editors see.
"""

from __future__ import annotations

import argparse
import functools
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from llmdebug_nb.core import option_parsing as read
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.option_declaration import HOW_MUCH, WHAT, WHEN, declaration_of, option
from llmdebug_nb.core.option_parsing import TokenSet
from llmdebug_nb.core.requests import RequestSet

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llmdebug_nb.core.moments import Condition

# the steps that are recorded by default, by front end; upstream's forms keep upstream's defaults
TOKENS = "0-3"  # dump, %%llmdump and most others
LAUNCH_ROUNDS = "0,0"  # llmdebug dump: msit's rounds in place of tokens
MSIT_TOKENS = (0,)  # DumpConfig
EVERY_TOKEN = "all"  # step, PrecisionDebugger, get_fx_dump_config and get_ge_dump_config

RUNS_FOLDER = "llmdebug_runs"
PARTS = {
    "both": ("input", "output"),
    "in": ("input",), "out": ("output",), "input": ("input",), "output": ("output",),
}  # fmt: skip
PHASES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}
GRAPHS = ("fx", "fused", "both")
FINGERPRINTS = ("xxh3", "crc32", "xor")
# the flag of all commands that may work on a cluster
CLUSTER_HELP = (
    "a Dask cluster that does the work: tcp://host:8786, or local for processes of this machine"
)
LAUNCH_SEED = 2024  # of a flag -seed without a number, as in msit


def runs_folder() -> Path:
    """Return the folder of runs: ``$LLMDEBUG_RUNS``, else ./llmdebug_runs."""
    return Path(os.environ.get("LLMDEBUG_RUNS") or RUNS_FOLDER)


# -- readers that belong to one option ------------------------------------------------------------


def _part_of_msit(text: str) -> str:
    """Read a part as a flag spells it: msit's numbers too."""
    return {"0": "in", "1": "out", "2": "both", "input": "in", "output": "out"}.get(text, text)


def _true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected True or False")
    return text.lower() == "true"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _joined(names: Sequence[str]) -> str | None:
    return "+".join(names) or None


def _stored(value: object) -> object:
    """Return the usual form of a value in a dump's JSON."""
    if isinstance(value, (TokenSet, RequestSet, Rounds)):
        return str(value)
    if isinstance(value, tuple):
        return [getattr(item, "__name__", item) for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpOptions:
    """What to record, and where to put it."""

    name: str = option("run", "name of the run", HOW_MUCH, read=read.name)
    path: str | os.PathLike[str] | None = option(
        None, "folder that will hold the run, or the URL of one, such as s3://bucket/runs"
        f" (default: {RUNS_FOLDER})", HOW_MUCH,
        read=read.path("the folder that will hold the run"),
        flags=("-o", "--output"), metavar="DIR",
    )  # fmt: skip
    tokens: TokenSet = option(
        TOKENS, "generated tokens, or steps of a loop: 0-3, 0,2,5-7, 4- or all; with every or last,"
        " all unless given", WHEN, read=TokenSet.parse,
    )  # fmt: skip
    every: int = option(
        1, "of those, only each N-th step: 100 takes 0, 100, 200 and so on", WHEN,
        read=read.positive("steps from one to the next"), flag_value=int, metavar="N",
    )  # fmt: skip
    last: int | None = option(
        None, "keep only the last N steps, and those before each alarm", HOW_MUCH,
        read=read.positive("steps to keep"), flag_value=int, metavar="N",
    )  # fmt: skip
    alarm: tuple[str | Condition, ...] = option(
        None, "with last, what keeps the steps before it for good: nan (NaN or infinity in a tensor"
        " or a loss), spike (a loss far above those before), spike:8 (of 8 standard deviations); in"
        " Python also functions of a `Moment`", HOW_MUCH,
        read=read.alarms, metavar="A,B",
    )  # fmt: skip
    rounds: Rounds | None = option(
        None, "in place of tokens, msit's rounds, as pairs of first and last: 1,3,5,7 is 1 to 3"
        " and 5 to 7; or all. Round 0 is the prefill and the first decode, or the warm-up if there"
        " is one", WHEN,
        read=read.unless_none(Rounds.parse), flags=("-er", "--range", "--execute-range"),
        metavar="A,B,…",
    )  # fmt: skip
    requests: RequestSet | None = option(
        None, "of an engine, only steps that compute these requests, by number or id: 0-3,"
        " 2,chat-7 or chat-*; tokens then count those of each request", WHEN,
        read=read.unless_none(RequestSet.parse), metavar="A,B",
    )  # fmt: skip
    ranks: TokenSet | None = option(
        None, "only these ranks of a distributed job: 0-3", WHEN,
        read=read.unless_none(TokenSet.parse),
    )  # fmt: skip
    warmup: int = option(
        0, "how many generations (or, outside generate, root calls) at the start are warm-ups",
        WHEN, read=read.count("generations to count as warm-up"), flag_value=int, metavar="N",
    )  # fmt: skip
    control: str | os.PathLike[str] | None = option(
        None, "JSON file that is read again when it changes, and switches recording on and off",
        WHEN, read=read.path("a JSON file"), flags=("-config", "--config", "--config-path"),
        metavar="F",
    )  # fmt: skip
    mode: tuple[str, ...] = option(
        "module", "module, api (functions and tensor methods), aten (dispatcher), or several:"
        " module+aten", WHAT, read=read.modes, store=_joined,
    )  # fmt: skip
    phase: str = option(
        "both", "forward, backward or both", WHAT, read=read.among(PHASES), choices=tuple(PHASES)
    )
    part: str = option(
        "both", "in, out or both (inputs are also 0, outputs 1, both 2)", WHAT,
        read=read.among(PARTS), flags=("-stp", "--save-tensor-part"), flag_value=_part_of_msit,
        choices=("both", "in", "out"),
    )  # fmt: skip
    layers: tuple[str, ...] = option(
        None, "glob(s) over module paths, with commas: model.layers.*.mlp; operators count with"
        " their modules", WHAT, read=read.names, metavar="GLOBS",
    )  # fmt: skip
    types: tuple[type | str, ...] = option(
        None, "module class(es) or their names, with commas: Linear,LlamaRMSNorm", WHAT,
        read=read.types, metavar="CLASSES",
    )  # fmt: skip
    opname: tuple[str, ...] = option(
        None, "only modules and operators whose class or name begins with this text, or one of"
        " these, in upper or lower case", WHAT,
        read=read.lower_names, flags=("-opname", "--operation-name"), metavar="A,B",
    )  # fmt: skip
    device: str | None = option(
        None, "only models on this device: cpu, cuda0, or the number of an accelerator", WHEN,
        read=read.unless_none(read.device_name), flags=("-device", "--device-id"), metavar="D",
    )  # fmt: skip
    time: int = option(
        3, "when inputs and outputs are read: 0 before a call (inputs only), 1 after it, 2 inputs"
        " at both times, 3 inputs before and outputs after", WHAT,
        read=read.time, flags=("-time", "--save-time"), flag_value=int, metavar="N",
    )  # fmt: skip
    apis: tuple[str, ...] = option(
        None, "operators: names or globs with commas, ! in front leaves out; or a YAML file with"
        " lists include and exclude", WHAT, read=read.apis,
    )  # fmt: skip
    contains: tuple[str, ...] = option(
        None, "only calls whose full name (Functional.linear.0.forward,"
        " Module.model.norm.LlamaRMSNorm.forward.0) holds one of these texts, with commas",
        WHAT, read=read.names,
    )  # fmt: skip
    scope: tuple[str, ...] = option(
        None, "only calls from one full name to another, both included, with a comma", WHAT,
        read=read.scope,
    )  # fmt: skip
    ids: tuple[str, ...] = option(
        None, "only calls with these execution ids: 2,3_1, or as msit counts: msit:3_1"
        " (llmdebug topology RUN shows both)",
        WHAT, read=read.execution_ids, flags=("-ids", "--save-operation-ids"), metavar="A,B",
    )  # fmt: skip
    children: bool = option(
        True, "with ids: also the calls below them; False without ids: layers alone", WHAT,
        read=read.flag, flags=("-child", "--save-operation-child"),
        flag_value=_true_or_false, metavar="BOOL",
    )  # fmt: skip
    weights: bool = option(False, "also the parameters, once", WHAT, read=read.flag)
    logits: bool = option(False, "only the last logits of each step", WHAT, read=read.flag)
    stats_only: bool = option(
        False, "statistics only, no values", HOW_MUCH,
        read=read.flag, flags=("-sd", "--save-desc", "--only-save-desc"),
    )  # fmt: skip
    slice: str | None = option(
        None, "keep a part of each tensor: 0,:,-1", HOW_MUCH, read=read.index, metavar="INDEX"
    )
    reduce: str | None = option(
        None, "keep figures of each tensor in place of its values: minmax or quantile:N",
        HOW_MUCH, read=read.reduction, metavar="R",
    )  # fmt: skip
    max_bytes: int | None = option(
        None, "keep no more values than this: 500MB, 2GiB", HOW_MUCH,
        read=read.parse_bytes, metavar="N",
    )  # fmt: skip
    overflow: int | None = option(
        None, "only calls with NaN or infinity, at most N of them (0: all)", WHAT,
        read=read.count("calls to record"), flag_value=int, metavar="N",
    )  # fmt: skip
    fingerprint: str = option(
        "xxh3", "how equal tensors are recognised", HOW_MUCH,
        read=read.among(FINGERPRINTS), choices=FINGERPRINTS,
    )  # fmt: skip
    sources: bool = option(
        True, "also the source: the line of each operator, and the text of the functions around it"
        " and of each forward", WHAT, read=read.flag,
    )  # fmt: skip
    seed: int | None = option(
        None, "seed Python, NumPy and torch at the start", WHEN,
        read=read.unless_none(read.seed), flags=("-seed",), flag_value=int, bare_flag=LAUNCH_SEED,
    )  # fmt: skip
    force_eager: bool = option(
        False, "run code of torch.compile eagerly in the recorded steps, instead of refusing it",
        WHAT, read=read.flag,
    )  # fmt: skip
    graph: str | None = option(
        None, "compile the model, and record every node of its graph (fx), every buffer that"
        " Inductor's kernels write (fused), or both: the graph is then a second run, NAME.fx",
        WHAT, read=read.unless_none(read.among(GRAPHS)), choices=GRAPHS,
    )  # fmt: skip
    fusion_switch: str | os.PathLike[str] | Mapping[str, object] | None = option(
        None, "with graph: JSON file (or, in Python, a mapping) of the fusions to switch off",
        WHAT, store=_text, metavar="F",
    )  # fmt: skip
    compiler_config: Mapping[str, object] | None = option(
        None, "settings of Inductor by name", WHAT,
        read=read.compiler_config, store=_text, flags=None,
    )  # fmt: skip
    profile: tuple[str, ...] = option(
        None, "also tables of times, joined by +: op (inputs and outputs of each call), kernel"
        " (the kernels of each operator), host (time of modules and operators on the host),"
        " tiling (launch configurations of fused kernels; with graph)", WHAT,
        read=read.profiles, store=_joined, metavar="T",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for each in fields(self):
            reader = declaration_of(each).read
            if reader is not None:
                object.__setattr__(self, each.name, reader(getattr(self, each.name), each.name))
        self._check_steps()
        self._check_graph()
        if self.alarm and self.last is None:
            raise OptionError("alarm is for last: say how many steps before it are kept, as last=8")
        if self.slice is not None and self.reduce is not None:
            raise OptionError(
                "slice and reduce exclude each other: a payload is a part of the tensor or"
                " figures of it"
            )

    def _check_steps(self) -> None:
        if self.time == 0 and PARTS[self.part] == ("output",):
            raise OptionError(
                "time=0 and part='out' exclude each other: before a call there are no outputs"
            )
        if self.graph is not None and self.time != 3:
            raise OptionError(
                "time and graph exclude each other: nodes of a graph leave their inputs alone"
            )
        if self.rounds is not None and str(self.tokens) != TOKENS:
            raise OptionError(
                "rounds and tokens exclude each other: both say which steps are recorded"
            )
        if self.rounds is not None and self.requests is not None:
            raise OptionError("rounds and requests exclude each other: say tokens of the requests")

    def _check_graph(self) -> None:
        if "tiling" in self.profile and self.graph not in ("fused", "both"):
            raise OptionError(
                f"profile {_joined(self.profile)!r}: tiling is of fused kernels, so say"
                " graph='fused', or 'both', as well"
            )
        for name in ("fusion_switch", "compiler_config"):
            if self.graph not in ("fused", "both") and getattr(self, name) is not None:
                raise OptionError(
                    f"{name} is for compiled code: say graph='fused', or 'both', as well"
                    if self.graph is None
                    else f"{name} is for Inductor's kernels, and graph='fx' makes none:"
                    " use 'fused' or 'both'"
                )
        if self.graph is None:
            return
        if self.operators:
            raise OptionError(
                f"mode {_joined(self.mode)!r}: of compiled code, graph={self.graph!r} says what is"
                " recorded; leave mode out"
            )
        if not self.children:
            raise OptionError("graph and children=False exclude each other")
        for name in ("force_eager", "logits", "ids"):
            if getattr(self, name):
                raise OptionError(f"graph and {name} exclude each other")

    @classmethod
    def of(cls, **options: Unpack[DumpKeywords]) -> DumpOptions:
        """Build from keyword arguments; an OptionError for an unknown one names the nearest."""
        known, values = cls.names(), dict[str, Any](options)
        for name in values:
            if name not in known:
                raise OptionError(f"option {name!r} is not known{nearest(name, known)}")
        if goes_on(values) and not values.keys() & {"tokens", "rounds"}:
            values["tokens"] = EVERY_TOKEN
        return cls(**values)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [each.name for each in fields(cls)]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are recorded: input, output."""
        return tuple(role for role in PARTS[self.part] if not (self.time == 0 and role == "output"))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that are recorded: forward, backward."""
        return PHASES[self.phase]

    @property
    def operators(self) -> bool:
        """True if operators are recorded, not only modules."""
        return self.mode != ("module",)

    @property
    def records_modules(self) -> bool:
        return "module" in self.mode

    @property
    def operator_levels(self) -> tuple[str, ...]:
        """The levels of operators that are recorded: api, aten."""
        return tuple(level for level in self.mode if level != "module")

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, ready for JSON.

        `of` makes the same options of them.
        """
        usual = type(self)()
        stored = self.as_json() | {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name in ("path", "control", "fusion_switch", "compiler_config")
            for value in [getattr(self, name)]
        }
        given = {name for name in stored if getattr(self, name) != getattr(usual, name)}
        if goes_on(dict.fromkeys(given)) and "rounds" not in given:
            given.add("tokens")
        return {name: value for name, value in stored.items() if name in given}

    def as_json(self) -> dict[str, Any]:
        """Return the options that a dump stores: all but ``path`` and ``control``."""
        return {
            each.name: (declaration_of(each).store or _stored)(getattr(self, each.name))
            for each in fields(self)
            if each.name not in ("path", "control")
        }


class DumpKeywords(TypedDict, total=False):
    """The types that each option of `DumpOptions` accepts."""

    name: str
    path: str | os.PathLike[str] | None
    tokens: int | str | Iterable[int | str] | TokenSet | None
    every: int
    last: int | None
    alarm: str | Condition | Iterable[str | Condition] | None
    rounds: str | Sequence[int] | Rounds | None
    requests: int | str | Iterable[int | str] | RequestSet | None
    ranks: int | str | Iterable[int | str] | TokenSet | None
    warmup: int
    control: str | os.PathLike[str] | None
    mode: str | Iterable[str]
    phase: str
    part: str
    layers: str | Iterable[str] | None
    types: type | str | Iterable[type | str] | None
    opname: str | Iterable[str] | None
    device: str | int | None
    time: int
    apis: str | os.PathLike[str] | Callable[..., object] | Iterable[object] | None
    contains: str | Iterable[str] | None
    scope: str | Iterable[str] | None
    ids: int | str | Iterable[str] | None
    children: bool
    weights: bool
    logits: bool
    stats_only: bool
    slice: str | None
    reduce: str | None
    max_bytes: int | str | None
    overflow: int | None
    fingerprint: str
    sources: bool
    seed: int | None
    force_eager: bool
    graph: str | None
    fusion_switch: str | os.PathLike[str] | Mapping[str, object] | None
    compiler_config: Mapping[str, object] | None
    profile: str | Iterable[str] | None


def goes_on(given: Mapping[str, object]) -> bool:
    """Tell whether options ask for a long run, so that all of its steps are meant."""
    return bool(given.keys() & {"every", "last"})


@functools.cache
def describe(**defaults: object) -> str:
    """Return the options with their help texts and defaults, as lines of a docstring."""
    lines: list[str] = []
    for group in (WHAT, WHEN, HOW_MUCH):
        lines += ["", f"Options, {group}:"]
        for each in fields(DumpOptions):
            declaration = declaration_of(each)
            if declaration.group == group:
                default = defaults.get(each.name, each.default)
                text = f"{each.name}: {declaration.help}"
                text += "" if default is None else f" (default: {default!r})"
                lines += textwrap.wrap(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join(lines)


DumpOptions.__doc__ = f"{DumpOptions.__doc__}\n{describe()}\n"
