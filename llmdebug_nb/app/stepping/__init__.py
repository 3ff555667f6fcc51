"""Stepping through a program: it halts where a condition holds, with its tensors at hand.

The program runs in a thread of its own and waits there, so a notebook stays free for other cells.
"""

from llmdebug_nb.app.stepping.stepper import COMMANDS, Stepper, step
from llmdebug_nb.app.stepping.stop import Stop

__all__ = ["COMMANDS", "Stepper", "Stop", "step"]
