"""The nouns of the zoo: an **Entry** (a bug or a benign change), its **Case**s and **Answer**s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from zoo import models

# name -> dtypes of golden's and of mine's weights
PRECISIONS = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.float32, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "bf16/bf16": (torch.bfloat16, torch.bfloat16),
}
BOTH = ("fp32", "bf16")
# what a comparison may say of a pair of runs in which nothing is wrong
HARMLESS = ("match", "within_noise", "nondeterministic")


class Seen(NamedTuple):
    """The call that a tool blames.

    ``path``: as in our records (``model.layers.0.mlp/Tensor.mul``, the root is ``""``). ``calls``:
    its number among the calls of that path in the step, on either side. ``functions``: the
    innermost function that called it, on either side. Both are empty if the tool doesn't tell.
    """

    path: str
    step: int = 0
    phase: str = "forward"
    calls: frozenset[int] = frozenset()
    functions: frozenset[str] = frozenset()


def answers(target: str, seen: Seen) -> bool:
    """Tell whether a call is a target: ``path``, ``path#call`` or ``path@function``; globs."""
    path, _, function = target.partition("@")
    path, _, call = path.partition("#")
    if not fnmatchcase(seen.path, path) or (call and seen.calls and int(call) not in seen.calls):
        return False
    return (
        not function
        or not seen.functions
        or any(fnmatchcase(name, function) for name in seen.functions)
    )


@dataclass(frozen=True)
class Answer:
    """The right answer to a case.

    ``exact``: targets (see `answers`), one of which must be named. ``modules``: globs over the
    modules around them. ``program``: keywords that change what mine's program does. ``model``:
    mine, if it is another model.
    """

    exact: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    step: int = 0
    phase: str = "forward"
    program: dict[str, Any] = field(default_factory=dict)
    model: models.Model | None = None

    @classmethod
    def at(cls, *exact: str, modules: tuple[str, ...] = (), **more: Any) -> Answer:
        """Return an answer whose modules are those of the targets."""
        paths = [target.partition("@")[0].partition("#")[0].partition("/")[0] for target in exact]
        return cls(exact, tuple(dict.fromkeys([*paths, *modules])), **more)

    def is_exact(self, seen: Seen) -> bool:
        return any(answers(target, seen) for target in self.exact)

    def is_module(self, seen: Seen) -> bool:
        return self.is_exact(seen) or any(
            fnmatchcase(seen.path.partition("/")[0], glob) for glob in self.modules
        )

    def is_step(self, seen: Seen) -> bool:
        return (seen.step, seen.phase) == (self.step, self.phase)


@dataclass(frozen=True)
class Entry:
    """A bug or a benign change.

    ``plant``: changes mine and returns the answer (None for a benign change). ``on``:
    architectures. ``work``: what the programs do. ``setup``: changes both models. ``config``:
    settings of both.
    """

    number: str
    name: str
    plant: Callable[[models.Model, Case], Answer | None]
    on: tuple[str, ...]
    precisions: tuple[str, ...] = BOTH
    work: Callable[..., None] = models.decode
    setup: Callable[[models.Model, Case], None] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    benign: bool = False

    def cases(self, seeds: int) -> Iterator[Case]:
        for seed in range(seeds):
            for architecture in self.on:
                for precision in self.precisions:
                    yield Case(self, architecture, precision, seed)


class Zoo(list[Entry]):
    """Entries, in the order in which they were defined."""

    def add(self, number: str, name: str, on: str, **more: Any) -> Callable[[Any], Any]:
        """Decorate a plant. ``on``: architectures, separated by spaces."""

        def define(plant: Any) -> Any:
            self.append(Entry(number, name, plant, tuple(on.split()), **more))
            return plant

        return define


@dataclass(frozen=True)
class Case:
    """An entry on one architecture, in one precision, with the weights and tokens of one seed."""

    entry: Entry
    architecture: str
    precision: str
    seed: int

    def __str__(self) -> str:
        name = f"{self.entry.number} {self.entry.name}"
        return f"{name}, {self.architecture} {self.precision} seed {self.seed}"

    @property
    def n(self) -> int:
        """The layer that is changed where only one is: not the first, and not always the same."""
        return 1 + self.seed % (models.LAYERS - 1)

    def path(self, part: str = "", n: int | str | None = None) -> str:
        """Return the path of a part of the changed layer (or of layer ``n``), or of the model."""
        names = models.ARCHITECTURES[self.architecture]
        if part in ("body", "final", "embed", "head"):
            return str(getattr(names, part))
        layer = names.layer.format(n=self.n if n is None else n)
        return f"{layer}.{getattr(names, part, part)}" if part else layer

    def part(self, model: models.Model, part: str = "", n: int | None = None) -> Any:
        return model.get_submodule(self.path(part, n))

    def golden(self) -> Program:
        """Return the program that is right."""
        return Program(self, self._model(0), 0, {})

    def mine(self) -> tuple[Program, Answer]:
        """Return the changed program, and the right answer."""
        model = self._model(1)
        answer = self.entry.plant(model, self) or Answer()
        model = model if answer.model is None else answer.model
        return Program(self, model, 1, answer.program), answer

    def _model(self, side: int) -> models.Model:
        model = models.build(self.architecture, self.seed, **self.entry.config)
        if self.entry.setup is not None:
            self.entry.setup(model, self)
        return models.cast(model, PRECISIONS[self.precision][side])


class Program(NamedTuple):
    """A model and what is done with it."""

    case: Case
    model: models.Model
    side: int
    given: dict[str, Any]

    def __call__(self) -> None:
        torch.manual_seed(
            1000 * self.side + self.case.seed
        )  # two processes draw different random numbers
        self.case.entry.work(self.model, self.case.seed, **self.given)
