"""Samples of weights that a program changes between its root calls, as an optimizer does."""

UPDATED = "updated"  # the role of the samples of weights: at first, and after each change
SAMPLES = 32  # values: half of them may miss a change, and it is seen
