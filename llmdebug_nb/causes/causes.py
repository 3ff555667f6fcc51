"""The causes that a finding can have: a closed set."""

INTRODUCED = "introduced"  # right inputs, wrong output
INHERITED = "inherited"  # the call only passes on, or magnifies, an error of its inputs
WRONG_INPUT = "wrong input"
WRONG_MASK = "wrong input: mask"
WRONG_POSITION = "wrong input: position"
WRONG_CACHE = "wrong input: cache"
WEIGHT = "weight differs"
UPDATED = "weight changed otherwise"  # between two root calls, as an optimizer does
SCALAR = "scalar argument differs"
OTHER_OPS = "missing/extra op"
NONDETERMINISTIC = "nondeterministic"
NEAR_TIE = "near tie"  # rounding decides which experts or tokens are chosen
OVERFLOW = "overflow starts here"
OTHER_TOKEN = "other token"  # the previous step chose another token, which is this step's input
CARRIED_OVER = "introduced or carried over"  # inputs agree, but state from an earlier step may not
UNKNOWN_INPUT = "introduced or inherited"  # the inputs were not recorded
BEFORE = "introduced before"  # seen at an input that nothing recorded made

OF_WEIGHTS = (WEIGHT, UPDATED)  # no line that runs makes the error
