"""The states of the generators that random numbers come from: whether a step draws, and from which.

Two programs that draw other numbers can't agree, whatever their code does.
"""

from __future__ import annotations

import torch

from llmdebug_nb.core.kernels.fingerprint import fingerprint


def state() -> str:
    """Return a fingerprint of the states of torch's generators, on all devices in use."""
    states = [torch.default_generator.get_state()]
    # no state can be read while a graph of kernels is captured
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        states += [each.get_state() for each in torch.cuda.default_generators]
    return fingerprint(b"".join(each.numpy().tobytes() for each in states))
