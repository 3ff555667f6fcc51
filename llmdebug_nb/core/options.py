"""Every option and its default, once. Front ends parse into these and pass them on unchanged."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from llmdebug_nb.core import option_parsing
from llmdebug_nb.core.errors import OptionError, nearest
from llmdebug_nb.core.msit_rounds import Rounds
from llmdebug_nb.core.option_parsing import TokenSet

TOKENS = "0-3"
RUNS_FOLDER = "llmdebug_runs"
PARTS = {
    "both": ("input", "output"),
    "in": ("input",),
    "out": ("output",),
    "input": ("input",),
    "output": ("output",),
}
PHASES = {"both": ("forward", "backward"), "forward": ("forward",), "backward": ("backward",)}
GRAPHS = ("fx", "fused", "both")
FINGERPRINTS = ("xxh3", "crc32", "xor")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")


def runs_folder() -> Path:
    """Return the folder in which runs are kept and looked up by name: ``$LLMDEBUG_RUNS``, else ./llmdebug_runs."""
    return Path(os.environ.get("LLMDEBUG_RUNS") or RUNS_FOLDER)


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
        if self.seed is not None and (
            not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32
        ):
            raise OptionError(f"seed {self.seed!r}: expected a whole number from 0 to 2**32 - 1")
        for option, what in (
            ("warmup", "generations to count as warm-up"),
            ("overflow", "calls to record"),
        ):
            value = getattr(self, option)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise OptionError(f"{option} {value!r}: expected how many {what}, 0 or more")
        if not isinstance(self.children, bool):
            raise OptionError(f"children {self.children!r}: expected True or False")
        self._check_graph()
        self._check_time()
        if self.slice is not None and self.reduce is not None:
            raise OptionError(
                "slice and reduce exclude each other: a payload is a part of the tensor or figures of it"
            )
        for option, value in (
            ("tokens", TokenSet.parse(self.tokens)),
            ("rounds", None if self.rounds is None else Rounds.parse(self.rounds)),
            ("opname", tuple(name.lower() for name in option_parsing.names(self.opname, "opname"))),
            ("device", None if self.device is None else option_parsing.device_name(self.device)),
            ("ranks", None if self.ranks is None else TokenSet.parse(self.ranks, "ranks")),
            ("mode", option_parsing.modes(self.mode)),
            ("phase", option_parsing.one_of(self.phase, PHASES, "phase")),
            ("part", option_parsing.one_of(self.part, PARTS, "part")),
            ("fingerprint", option_parsing.one_of(self.fingerprint, FINGERPRINTS, "fingerprint")),
            ("layers", option_parsing.names(self.layers, "layers")),
            ("types", option_parsing.types(self.types)),
            ("apis", option_parsing.apis(self.apis)),
            ("contains", option_parsing.names(self.contains, "contains")),
            ("scope", option_parsing.scope(self.scope)),
            ("ids", option_parsing.execution_ids(self.ids)),
            ("slice", option_parsing.index(self.slice)),
            ("reduce", option_parsing.reduction(self.reduce)),
            ("max_bytes", option_parsing.parse_bytes(self.max_bytes)),
            ("profile", option_parsing.profiles(self.profile)),
            ("seed", None if self.seed is None else int(self.seed)),
        ):
            object.__setattr__(self, option, value)

    def _check_time(self) -> None:
        if type(self.time) is not int or self.time not in range(4):
            raise OptionError(
                f"time {self.time!r}: expected 0 (before), 1 (after), 2 (both) or 3 (inputs before, outputs after)"
            )
        if self.time == 0 and PARTS.get(self.part) == ("output",):
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

    def _check_graph(self) -> None:
        if "tiling" in option_parsing.profiles(self.profile) and self.graph not in (
            "fused",
            "both",
        ):
            raise OptionError(
                f"profile {self.profile!r}: tiling is of fused kernels, so say graph='fused', or 'both', as well"
            )
        if self.graph is None:
            for option in ("fusion_switch", "compiler_config"):
                if getattr(self, option) is not None:
                    raise OptionError(
                        f"{option} is for compiled code: say graph='fused', or 'both', as well"
                    )
            return
        option_parsing.one_of(self.graph, GRAPHS, "graph")
        if option_parsing.modes(self.mode) != ("module",):
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
            name: getattr(self, name)
            for name in ("path", "control", "fusion_switch", "compiler_config")
        }
        differing = {
            name: said[name] for name in said if getattr(self, name) != getattr(usual, name)
        }
        return {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in differing.items()
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
            **{
                name: list(getattr(self, name))
                for name in ("layers", "opname", "apis", "contains", "scope", "ids")
            },
        }
        names = [name for name in self.names() if name not in ("path", "control")]
        said |= {
            name: value if value is None else str(value)
            for name in ("fusion_switch", "compiler_config")
            for value in [getattr(self, name)]
        }
        return {name: said.get(name, getattr(self, name)) for name in names}
