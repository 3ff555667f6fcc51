"""The nouns of the port benchmark: a **Port**, its **Bug**s, and the **Program**s to record.

A port is an independent implementation of a Hugging Face model that runs with the same weights,
converted. Golden is the Hugging Face model; mine is the port, right or with one bug.
"""

from __future__ import annotations

import ast
import atexit
import copy
import difflib
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from zoo import models
from zoo.entry import PRECISIONS

from ports.weights import Change, Model, Norms, State, add_outliers

Logits = list[torch.Tensor]
WEIGHTS = ("ordinary", "outliers")


@dataclass(frozen=True)
class Bug:
    """One mistake in a port, and the right answer.

    One of these makes it: ``old``, ``new``: a substitution in the port's source, where ``old``
    occurs once. ``convert``: changes the port's converted weights in place. ``settings``: other
    settings of the port, see `Port.make`.

    ``modules``: globs over the innermost recorded modules, in golden or mine, in which the changed
    line runs or whose weight is wrong. ``golden``: globs over the full paths of golden's calls that
    mine leaves out (``model.layers.*.self_attn/Tensor.add``, or a module), if need be with
    ``@function`` for the innermost function that calls it: for a bug that removes a call, they are
    as exact as the line. ``also``: other texts of the changed source (each once in it; of
    ``a ... b`` the first b after a), whose lines are right too: the first operator that takes the
    wrong value where the changed line gives views and names alone. ``early``: the changed line runs
    before the recording, so that the modules are the answer. ``least``: by how much it changes the
    logits at least, as a relative L2 error.
    """

    name: str
    what: str
    old: str = ""
    new: str = ""
    convert: Change | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    golden: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    early: bool = False
    least: float = 1e-3

    @property
    def in_code(self) -> bool:
        return bool(self.old)

    def source(self, text: str) -> str:
        """Return the port's source with the bug. Raises ValueError if ``old`` isn't there once."""
        if not self.in_code:
            return text
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} occurs {text.count(self.old)} times, not once"
            )
        return text.replace(self.old, self.new)

    def lines(self, text: str) -> frozenset[int]:
        """Return the numbers of the lines of the changed source that are the right answer.

        ``text``: the source without the bug. They are the statements that differ; none if lines
        were removed and `golden` is the answer.
        """
        if not self.in_code:
            return frozenset()
        changed = self.source(text)
        old, new = text.splitlines(), changed.splitlines()
        touched: set[int] = set()
        for tag, _, _, first, last in difflib.SequenceMatcher(None, old, new, False).get_opcodes():
            if tag in ("replace", "insert"):
                touched |= set(range(first + 1, last + 1))
        touched |= {self._line(changed, more) for more in self.also}
        return frozenset(touched | statements(changed, touched))

    def _line(self, text: str, where: str) -> int:
        """Return the number of the line of a text; ``a ... b`` is the first b after a."""
        first, *rest = where.split(" ... ")
        if text.count(first) != 1:
            raise ValueError(f"{self.name}: {first!r} occurs {text.count(first)} times, not once")
        at = text.index(first)
        for part in rest:
            at = text.index(part, at)
        return text[:at].count("\n") + 1

    def names_module(self, path: str) -> bool:
        """Tell whether a module is an innermost one in which the bug is."""
        return any(fits(path, glob) for glob in self.modules)

    def is_near(self, path: str) -> bool:
        """Tell whether a module directly encloses one in which the bug is, or is a child of one."""
        if parent(path) and self.names_module(parent(path)):  # all are children of the root
            return True
        return any(fits(path, parent(glob)) for glob in self.modules)

    def leaves_out(self, path: str, function: str = "") -> bool:
        """Tell whether a call of golden (its full path) is one that mine leaves out."""
        for target in self.golden:
            glob, _, caller = target.partition("@")
            if fits(path, glob) and (not caller or function in ("", caller)):
                return True
        return False


def fits(path: str, glob: str) -> bool:
    """Tell whether each part of a path fits that of a glob: a star stands for no dot."""
    parts, globs = path.split("."), glob.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def parent(path: str) -> str:
    return path.rpartition(".")[0]


def statements(text: str, touched: set[int]) -> set[int]:
    """Return all lines of the simple statements (no blocks) that stand on some of the lines."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            lines |= own if own & touched else set()
    return lines


class Program(NamedTuple):
    """A model and what is done with it. ``origin``: the Hugging Face model in float32.

    Called, it returns each root call's logits, [tokens, vocabulary] or [1, tokens, vocabulary].
    """

    model: Model
    work: Callable[[Model, torch.Tensor], Logits]
    ids: torch.Tensor
    origin: Model
    precision: str

    @torch.no_grad()
    def __call__(self) -> Logits:
        return self.work(self.model, self.ids)


@dataclass(frozen=True)
class Port:
    """An implementation of a Hugging Face model, with its bugs.

    ``source``: the file with the port's code, or a function that returns it; a copy of it, changed
    by a bug, is imported as a module of ``package``. ``original(seed)`` returns the Hugging Face
    model, float32, in evaluation mode. ``make(code, original, **settings)`` returns the port from
    the imported code, its weights not loaded yet. ``convert(original)`` returns its weights by
    name. ``golden_work``, ``work``: what is done with each model and the token ids [1, length];
    they return the logits of each root call. ``norms(original)``: each norm with the linear layers
    that take its output, for weights with outliers. ``offset``: what is added to a norm's weight.
    ``error``: the largest relative L2 error of the right port's logits in float32.
    ``prepare(model, dtype)`` makes the port ready to run with weights of that dtype.
    ``missing()`` says why the port can't run here, or returns None.
    """

    name: str
    source: Path | Callable[[], Path]
    original: Callable[[int], Model]
    make: Callable[..., Model]
    convert: Callable[[Model], State]
    golden_work: Callable[[Model, torch.Tensor], Logits]
    work: Callable[[Model, torch.Tensor], Logits]
    norms: Norms
    bugs: tuple[Bug, ...]
    length: int = 15
    offset: float = 0.0
    error: float = 1e-5
    package: str = ""
    prepare: Callable[[Model, torch.dtype], object] = lambda model, dtype: None
    missing: Callable[[], str | None] = lambda: None

    @property
    def path(self) -> Path:
        return self.source if isinstance(self.source, Path) else self.source()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def file(self, bug: Bug | None = None) -> str:
        """Return the name of the copy of the port's source, changed by a bug."""
        return f"{self.name}_{bug.name if bug else 'right'}.py"

    def bug(self, name: str) -> Bug:
        return next(bug for bug in self.bugs if bug.name == name)

    def golden(self, precision: str = "fp32", weights: str = "ordinary", seed: int = 0) -> Program:
        """Return the Hugging Face model and its work. ``precision``: golden's, then mine's."""
        origin = self.original(seed)
        if weights == "outliers":
            add_outliers(self.norms(origin), seed, self.offset)
        model = models.cast(copy.deepcopy(origin), PRECISIONS[precision][0])
        ids = torch.randint(
            3,
            origin.config.vocab_size,
            (1, self.length),
            generator=torch.Generator().manual_seed(seed),
        )
        return Program(model, self.golden_work, ids, origin, precision)

    def mine(self, golden: Program, bug: Bug | None = None) -> Program:
        """Return the port, right or with a bug, with golden's weights converted."""
        origin = golden.origin
        text = self.text
        code = load(bug.source(text) if bug else text, self.file(bug), self.package)
        with torch.no_grad():
            state = {name: value.clone() for name, value in self.convert(origin).items()}
            if bug and bug.convert:
                bug.convert(state)
            model = self.make(code, origin, **(bug.settings if bug else {})).eval()
            said = model.load_state_dict(state, strict=False)
        absent = {name for name, _ in model.named_parameters()} & set(said.missing_keys)
        if absent or said.unexpected_keys:
            raise ValueError(
                f"{self.name}: weights missing {absent}, unknown {said.unexpected_keys}"
            )
        dtype = PRECISIONS[golden.precision][1]
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.prepare(model, dtype)
        return Program(model, self.work, golden.ids, origin, golden.precision)


# -- code ----------------------------------------------------------------------------------------


@cache
def scratch() -> Path:
    """Return a folder for changed sources, which lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="ports")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def load(text: str, file: str, package: str) -> ModuleType:
    """Import a source, written to a file of that name, as a module of a package."""
    path = scratch() / file
    path.write_text(text, encoding="utf-8")
    name = f"{package}.{path.stem}" if package else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code  # dataclasses look their module up
    spec.loader.exec_module(code)
    return code


def difference(golden: Logits, mine: Logits) -> float:
    """Return the largest relative L2 error of the logits of a root call, of its last rows."""
    assert len(golden) == len(mine)
    errors = [0.0]
    for right, ours in zip(golden, mine, strict=True):
        a = right.double().reshape(-1, right.shape[-1])
        b = ours.double().reshape(-1, ours.shape[-1])
        rows = min(len(a), len(b))
        a, b = a[-rows:], b[-rows:]
        errors.append(float((a - b).norm() / a.norm()))
    return max(errors)
