"""The states of the generators that random numbers come from: whether a step draws, and from which.

Two programs that draw other numbers can't agree, whatever their code does.
"""

from __future__ import annotations

import torch

from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.raw import captures_graph

States = dict[str, str]  # fingerprints, by device


def states() -> States:
    """Return the states of torch's generators, on all devices in use."""
    found = {"cpu": torch.default_generator}
    if torch.cuda.is_initialized() and not captures_graph():  # type: ignore[no-untyped-call]
        found |= {str(each.device): each for each in torch.cuda.default_generators}
    return {name: fingerprint(each.get_state().numpy().tobytes()) for name, each in found.items()}


def moved(before: States, after: States) -> list[tuple[str, str]]:
    """Return the devices whose generator was drawn from or set, with both states as a text."""
    return [
        (name, f"{state} {after[name]}")
        for name, state in before.items()
        if name in after and after[name] != state
    ]
