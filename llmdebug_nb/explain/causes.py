"""Why something is to blame: a closed set."""

INTRODUCED = "introduced"  # right inputs, wrong output
INHERITED = "inherited"  # the call only passes on, or magnifies, an error that it was given
WRONG_INPUT = "wrong input"
WRONG_MASK = "wrong input: mask"
WRONG_POSITION = "wrong input: position"
WRONG_CACHE = "wrong input: cache"
WEIGHT = "weight differs"
SCALAR = "scalar argument differs"
OTHER_OPS = "missing/extra op"
NONDETERMINISTIC = "nondeterministic"
OVERFLOW = "overflow starts here"
OTHER_TOKEN = "other token"  # the step's input is a token that the step before chose differently
CARRIED_OVER = "introduced or carried over"  # inputs agree, but an earlier step had diverged: state such as a cache
UNKNOWN_INPUT = "introduced or inherited"  # the inputs were not recorded
BEFORE = "introduced before"  # seen at an input, and nothing that was recorded made it

CAUSES = (
    INTRODUCED, INHERITED, WRONG_INPUT, WRONG_MASK, WRONG_POSITION, WRONG_CACHE, WEIGHT, SCALAR, OTHER_OPS,
    NONDETERMINISTIC, OVERFLOW, OTHER_TOKEN, CARRIED_OVER, UNKNOWN_INPUT, BEFORE,
)  # fmt: skip
