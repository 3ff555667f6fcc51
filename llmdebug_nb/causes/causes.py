"""The causes that a finding can have: a closed set, each with the words that it is told in."""

from __future__ import annotations

from dataclasses import dataclass

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
GRADIENT = "missing gradient"
NONDETERMINISTIC = "nondeterministic"
NEAR_TIE = "near tie"  # rounding decides which experts or tokens are chosen
OVERFLOW = "overflow starts here"
OTHER_TOKEN = "other token"  # the previous step chose another token, which is this step's input
CARRIED_OVER = "introduced or carried over"  # inputs agree, but state from an earlier step may not
UNKNOWN_INPUT = "introduced or inherited"  # the inputs were not recorded
UNTRAINED = "weight not trained"
WRONG_GRADIENT = "wrong input: gradient"  # what the loss gives to the model
BEFORE = "introduced before"  # seen at an input that nothing recorded made


@dataclass(frozen=True)
class Cause:
    """What is said of a cause.

    ``made``: a sentence on the error, with ``{where}``. ``advice``: what to do next. ``head``:
    what stands before the place. ``is_last``: nothing that made the error was found, so findings of
    other causes come first. ``advises``: its advice is the best one, whatever the tensors show.
    ``of_weights``: no line inside the module makes the error.
    """

    made: str = "The cause is {where}"
    advice: str = "Look at the code there"
    head: str = ""
    is_last: bool = False
    advises: bool = False
    of_weights: bool = False


_CAUSES = {
    INTRODUCED: Cause("The error is made in {where}"),
    INHERITED: Cause(
        "{where} does not make the error, it only magnifies that of its inputs",
        "Look at its inputs: record golden in a higher precision too, or pass limits if this error "
        "is acceptable",
        "Magnified in",
        is_last=True,
    ),
    WRONG_INPUT: Cause(
        "The error is made outside, and enters {where} with its inputs",
        "Record both runs on the same input",
        "Enters at",
    ),
    WRONG_MASK: Cause(
        "The error enters {where} with its mask",
        "Look at the code that builds the mask",
        "A wrong mask enters at",
    ),
    WRONG_POSITION: Cause(
        "The error enters {where} with its positions",
        "Look at the code that counts positions, with its offset and padding",
        "Wrong positions enter at",
    ),
    WRONG_CACHE: Cause(
        "The error enters {where} with its cache",
        "Look at the values that the previous step wrote to the cache",
        "A wrong cache enters at",
    ),
    WEIGHT: Cause(
        "The error is made in {where}, by a different weight and not by its code",
        "Look at how the weight is loaded, split, tied or converted",
        "A weight differs in",
        of_weights=True,
    ),
    UPDATED: Cause(
        "The error is made before {where} runs, where its weights are changed",
        "Look at what changes weights between the steps: the optimizer and its settings, the "
        "learning rate, clipping, and how gradients are added up or reduced",
        "Weights were changed otherwise before",
        advises=True,
        of_weights=True,
    ),
    UNTRAINED: Cause(
        "{where} has weights that one program does not train",
        "Look at requires_grad, and at detach(), no_grad() and .data on the way to the loss",
        "Not trained in one program:",
        advises=True,
    ),
    WRONG_GRADIENT: Cause(
        "The error enters {where} with the gradient that the loss gives it",
        "Look at the loss, outside of the model: its reduction, the labels that count, and factors "
        "such as a GradScaler's or that of accumulated steps",
        "Another gradient enters at",
        advises=True,
    ),
    SCALAR: Cause(
        "The error is made in {where}, by a different setting and not by its code",
        "Set it to golden's value and compare again",
        "A setting differs in",
        advises=True,
    ),
    OTHER_OPS: Cause(
        "The error is made at {where}, as the two programs call other operators",
        "Look at this code in both programs",
    ),
    GRADIENT: Cause(
        "The error is made before {where}: what it takes is cut off from the gradients",
        "Look for a detach, .data or no_grad on the way to what it takes",
        "No gradient goes on from",
        advises=True,
        of_weights=True,
    ),
    NONDETERMINISTIC: Cause(
        "The result of {where} changes from run to run, which hides whether there is an error",
        "Call ld.seed_all in both programs or switch dropout off, then record and compare again",
        "Changes from run to run in",
        is_last=True,
        advises=True,
    ),
    NEAR_TIE: Cause(
        "There is no error in {where}",
        "Record both runs in a higher precision, or on another input",
        "Rounding decides in",
        is_last=True,
    ),
    OVERFLOW: Cause(
        "The error is made in {where}, where values overflow",
        "Scale its inputs, or compute it in a wider dtype",
        "Overflows in",
        advises=True,
    ),
    OTHER_TOKEN: Cause(
        "The error comes from the previous step, which chose another token",
        "Feed both runs the same tokens, or decode greedily",
        "Another token enters at",
        advises=True,
    ),
    CARRIED_OVER: Cause(
        "The error is made in {where}, or a cache or changed weights carry it over from an earlier "
        "step",
        "Look at the first step that differs",
        "Made or carried over in",
        is_last=True,
    ),
    UNKNOWN_INPUT: Cause(
        "{where} makes or inherits the error: its inputs were not recorded",
        "Record inputs as well as outputs",
        "Made or inherited in",
    ),
    BEFORE: Cause(
        "The error comes from code that was not recorded, in {where}",
        "Record inputs and outputs of all modules",
        "Made before",
    ),
}


def about(cause: str) -> Cause:
    """Return what is said of a cause, by its name."""
    return _CAUSES.get(cause, Cause())
