"""The lines of the program that led to each call of a run, modules included."""

from __future__ import annotations

from llmdebug_nb.core.paths import module_of, parent_of
from llmdebug_nb.core.records import CallKey, Frame, forward_in
from llmdebug_nb.store.run import Run

_Call = tuple[str, int]


class CallStacks:
    """Reads the call stacks of a run pass by pass, as the calls of a pass are asked in a row.

    A module's stack is that of the first operator that ran in it, from around the module's forward
    on: the line that calls the module. It is known of its first call in a pass.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begins = {node.path: node.source for node in run.nodes}
        self._pass: tuple[object, ...] = ()
        self._stacks: dict[_Call, tuple[Frame, ...]] = {}

    def of(self, key: CallKey) -> tuple[tuple[Frame, str], ...]:
        """Return the lines that led to a call, innermost first, with their code; () if unknown.

        A backward pass has none: no line of the program calls it. Raises CorruptDumpError.
        """
        if key.phase != "forward":
            return ()
        if (now := (key.rank, key.generation, key.step)) != self._pass:
            self._pass, self._stacks = now, self._of_pass(key)
        frames = self._stacks.get((key.path, key.call), ())
        return tuple((frame, self._run.index.code(frame)) for frame in frames)

    def _of_pass(self, key: CallKey) -> dict[_Call, tuple[Frame, ...]]:
        known = self._run.index.stacks(key)
        stacks = dict(known)
        for (path, _), frames in known.items():
            module = module_of(path)
            while (module, 0) not in stacks:
                inside = forward_in(frames, self._begins.get(module))
                frames = frames if inside is None else frames[inside + 1 :]
                stacks[module, 0] = frames
                if not module:
                    break
                module = parent_of(module)
        return stacks
