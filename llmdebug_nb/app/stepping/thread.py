"""Running a program in a thread of its own, under the settings of the thread that steps it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llmdebug_nb.core.errors import LLMDebugError


@dataclass
class Ended:
    """How a program ended: its result, or its error."""

    result: object = None
    error: BaseException | None = None

    @contextlib.contextmanager
    def own_errors_second(self) -> Iterator[None]:
        """Keep an error of the recording only if the program itself raised none."""
        try:
            yield
        except LLMDebugError as error:
            self.error = self.error or error


def under_same_settings(work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` with the settings of this thread, to be run in another one.

    Grad mode, inference mode, autocast, the number of threads and context variables belong to a
    thread.
    """
    import torch

    context = contextvars.copy_context()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    threads = torch.get_num_threads()
    casts = [
        torch.autocast(kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def run() -> object:
        torch.set_num_threads(threads)
        with contextlib.ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for cast in casts:
                stack.enter_context(cast)
            return context.run(work)

    return run
