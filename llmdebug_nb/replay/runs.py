"""The two runs as the search for causes sees them: records, values, scalars, live modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING

from llmdebug_nb.core.determinism import GENERATOR
from llmdebug_nb.core.errors import CorruptDumpError, TensorLookupError
from llmdebug_nb.core.paths import is_operator, module_of
from llmdebug_nb.core.records import CallKey, Kernel, Node, Record, Site
from llmdebug_nb.replay import execution
from llmdebug_nb.replay.checks import GAP, STATISTICS
from llmdebug_nb.replay.execution import Results, Task
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.store.queries import ScalarRow
from llmdebug_nb.store.run import Run

if TYPE_CHECKING:
    import torch

Scalar = tuple[str, str | None]  # type name, text


class Side:
    """One of the two runs.

    ``kernels(site)``: the kernel that computed the outputs of a call. ``execute(task)``: runs an
    operator of it, see `execution.py`.
    """

    def __init__(
        self,
        run: Run,
        kernels: Callable[[Site], Kernel | None] = lambda site: None,
        execute: Callable[[Task], Results] = execution.run,
    ) -> None:
        self.run, self.kernels, self.execute = run, kernels, execute
        self._drawn: dict[tuple[int, int], dict[tuple[int, str], str | None]] = {}
        self._steps: dict[tuple[int, int, str], dict[tuple[str, str, int], dict[str, Scalar]]] = {}

    def records(self, key: CallKey, role: str) -> list[Record]:
        """Return the records of one call in a role."""
        return list(self.run.records(role=role, **key._asdict()))

    def load(self, record: Record) -> torch.Tensor:
        """Return the values of a record. Raises CannotReplay if they are not complete."""
        if record.payload is None or record.kept is not None:
            where = f"{record.site.role} {record.site.slot}"
            raise CannotReplay(f"the values of {where} were not kept", STATISTICS)
        try:
            return self.run.load(record)
        except (CorruptDumpError, TensorLookupError) as error:
            raise CannotReplay(str(error), GAP) from None

    def scalars(self, key: CallKey, role: str = "input") -> dict[str, Scalar]:
        """Return the arguments of a call that are not tensors, by slot; or what another role has.

        In older dumps, which keep no phase with them, only forward calls have them.
        """
        step = key.generation, key.step, role
        if step not in self._steps:
            calls = self._steps[step] = {}
            for row in self.run.index.scalars(generation=step[0], step=step[1], role=role):
                call = row.phase or "forward", row.path, row.call
                calls.setdefault(call, {})[row.slot] = _scalar(row)
        return self._steps[step].get((key.phase, key.path, key.call), {})

    def drawn_from(self, step: tuple[int, int]) -> dict[tuple[int, str], str | None]:
        """Return the states of generators that a generation and step drew from.

        By number, as a step may have several root calls, and by device.
        """
        if step not in self._drawn:
            generation, number = step
            found = self._drawn[step] = {}
            counts = Counter[str]()
            for row in self.run.index.scalars(generation=generation, step=number, role=GENERATOR):
                found[counts[row.slot], row.slot] = row.value
                counts[row.slot] += 1
        return self._drawn[step]

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The modules, by path."""
        return {node.path: node for node in self.run.nodes}

    @cached_property
    def attributes(self) -> dict[str, dict[str, Scalar]]:
        """Plain attributes of each module, by path."""
        return self._of_modules("attribute")

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, Scalar]]:
        """Fingerprints of each module's own parameters, by path: (dtype and shape, fingerprint)."""
        return self._of_modules("weight")

    def _of_modules(self, role: str) -> dict[str, dict[str, Scalar]]:
        modules: dict[str, dict[str, Scalar]] = {}
        for row in self.run.index.scalars(role=role):
            modules.setdefault(row.path, {}).setdefault(row.slot, _scalar(row))
        return modules

    def kernel(self, key: CallKey) -> Kernel | None:
        """Return the kernel of compiled code that computed the outputs of a call, or None."""
        return self.kernels(
            Site(key.path, key.step, key.call, key.phase, generation=key.generation)
        )


def _scalar(row: ScalarRow) -> Scalar:
    """Return type and text; a number whose text is none, as a damaged dump has, is only a text."""
    try:
        if row.type in ("int", "float"):
            (int if row.type == "int" else float)(row.value or 0)
    except ValueError:
        return "str", row.value
    return row.type, row.value


@dataclass
class Runs:
    """Both runs.

    ``error(golden, mine)``: relative L2 error of two tensors of one shape, inf if NaN or infinities
    differ. ``module(path)``: the live module of mine's model, or None if it is gone;
    ``golden_module(path)``: of golden's. ``grafted``: ids of mine's tensors in whose place mine
    went on with golden's values: what they would have led to was never seen.
    """

    golden: Side
    mine: Side
    error: Callable[[torch.Tensor, torch.Tensor], float]
    module: Callable[[str], torch.nn.Module | None] = field(default=lambda path: None)
    golden_module: Callable[[str], torch.nn.Module | None] = field(default=lambda path: None)
    grafted: Collection[int] = frozenset()
    _same_class: dict[str, bool] = field(default_factory=dict, init=False, repr=False)

    def drew_others(self, key: CallKey) -> bool:
        """Tell whether both draw random numbers in the step of a call, and not the same ones.

        A program that sets its generator in the step draws the same from wherever it was.
        """
        step = key.generation, key.step
        golden, mine = self.golden.drawn_from(step), self.mine.drawn_from(step)
        for place in golden.keys() & mine.keys():
            states = [(side[place] or "").split() for side in (golden, mine)]
            if all(a != b for a, b in zip(*states, strict=False)):
                return True
        return False

    def trains(self, golden: CallKey | None, mine: CallKey | None) -> bool:
        """Tell whether two modules are in training mode, in which modules draw random numbers."""
        keys = zip((self.golden, self.mine), (golden, mine), strict=True)
        modes = [side.attributes.get(key.path, {}).get("training") for side, key in keys if key]
        return bool(modes) and all(mode is not None and mode[1] == "True" for mode in modes)

    def same_code(self, golden: Record, mine: Record) -> bool:
        """Tell whether the same code made two tensors: one operator, in one class of module.

        Two packages may use one name: their classes stand in files of other names. A class that
        was patched in place, or in a copy of its file, is still the same; so is a module that was
        given a function as its forward. Operators outside of modules run in the program's own
        functions. A grafted tensor counts as such a one: it is wrong by itself, whatever follows.
        """
        if mine.id in self.grafted:
            return True
        path = module_of(golden.site.path)
        if golden.op != mine.op or path != module_of(mine.site.path) or not self.same_class(path):
            return False
        return bool(path) or self._in_one_function(golden, mine)

    def _in_one_function(self, golden: Record, mine: Record) -> bool:
        """Tell whether functions of one name call two operators, as far as that was recorded."""
        if not is_operator(golden.site.path):
            return True
        sides = zip((self.golden, self.mine), (golden, mine), strict=True)
        frames = [side.run.index.frames(record.site.key, whole=True) for side, record in sides]
        names = {frame[0].function for frame in frames if frame}
        return len(names) < 2

    def same_class(self, path: str) -> bool:
        """Tell whether both programs have a module of one class at a path."""
        if path not in self._same_class:
            self._same_class[path] = self._is_same_class(path)
        return self._same_class[path]

    def _is_same_class(self, path: str) -> bool:
        here, there = self.golden.nodes.get(path), self.mine.nodes.get(path)
        if here is None or there is None:
            return here is there
        methods = [n.source for n in (here, there) if n.source and "." in n.source.function]
        files = {PurePath(source.file).name for source in methods}
        return here.type == there.type and not (
            len(files) > 1 and all(name.endswith(".py") for name in files)
        )
