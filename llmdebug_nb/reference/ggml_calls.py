"""References of the nodes of llama.cpp's graphs, by the formulas of ggml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from llmdebug_nb.core import ggml
from llmdebug_nb.core.ggml import FACTS, PREFIX, ROLE, NodeFacts, Source, owner_of
from llmdebug_nb.core.kernels.ggml_blocks import Rounding, has_offsets, sums_in_half
from llmdebug_nb.core.records import CallKey
from llmdebug_nb.reference import ggml_elements as elements
from llmdebug_nb.reference import ggml_products as products
from llmdebug_nb.reference.computed import Change, Computed, Tensors, formula, longest
from llmdebug_nb.reference.ggml_given import Given, in_axes, numbers, sources_of
from llmdebug_nb.reference.operator_calls import kept
from llmdebug_nb.replay.checks import GAP, UNKNOWN
from llmdebug_nb.replay.operators import CannotReplay
from llmdebug_nb.replay.runs import Side

_PRODUCTS: dict[str, Callable[[Given, Rounding], torch.Tensor]] = {
    "MUL_MAT": products.mul_mat,
    "MUL_MAT_ID": products.mul_mat_id,
    "FLASH_ATTN_EXT": products.flash_attention,
}
FORMULAS: dict[str, elements.Formula] = {**elements.FORMULAS, "SOFT_MAX": products.soft_max}
_SETS = ("TOP_K",)  # their results are in any order


class Weights(Protocol):
    """Where the weights of a run come from."""

    def of(self, name: str, kind: str, prefix: str) -> torch.Tensor:
        """Return a weight by its name in the file and ggml's type. Raises CannotReplay."""
        ...


class RecordedWeights:
    """The weights that a run itself has."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def of(self, name: str, kind: str, prefix: str) -> torch.Tensor:
        module, slot = owner_of(name)
        records = list(self._side.run.records(path=prefix + module, role="weight", slot=slot))
        if not records:
            raise CannotReplay(
                "its weight was not recorded; record with weights=True, or give the file that ran"
                " (--weights)",
                GAP,
            )
        return self._side.load(records[0])


class GgmlCall(Computed):
    """A node of ggml on its recorded inputs. Raises CannotReplay."""

    def __init__(self, side: Side, key: CallKey, op: str, weights: Weights) -> None:
        self._op = op.removeprefix(PREFIX)
        if self._op not in FORMULAS and self._op not in _PRODUCTS:
            raise CannotReplay(f"no formula of {op} is known", UNKNOWN)
        facts = _facts(side, key)
        if facts.device and self._op in _PRODUCTS:
            raise CannotReplay(
                f"it ran on {facts.device}: how ggml rounds there is not known", UNKNOWN
            )
        self.recorded = {
            slot: self._ordered(in_axes(x, facts.ne, facts.tokens))
            for slot, x in kept(side, key).items()
        }
        inputs = {r.site.slot: side.load(r) for r in side.records(key, "input")}

        def weight(source: Source) -> torch.Tensor:
            return weights.of(source.weight, source.type, facts.prefix)

        self._sources = sources_of(facts, inputs, weight)
        self._types = {source.slot: source.type for source in facts.sources}
        self._parameters: Mapping[str, float] = numbers(side.scalars(key))
        self._ne = tuple(facts.ne)
        self.length = longest(*self.operands, *self.recorded.values())
        self.rounds_to = self._rounds_to()
        with_offsets = self._op in _PRODUCTS and has_offsets(self._types.get(0, ""))
        self.is_one = not with_offsets and self._op != "FLASH_ATTN_EXT"

    def _rounds_to(self) -> torch.dtype | None:
        if self._op == "FLASH_ATTN_EXT":  # it adds up in the dtype of the values
            return torch.float16 if self._types.get(2) == "f16" else None
        halves = self._op in elements.IN_HALF or (
            self._op in _PRODUCTS and sums_in_half(self._types.get(0, ""))
        )
        return torch.float16 if halves else None

    @property
    def operands(self) -> list[torch.Tensor]:
        return list(self._sources.values())

    def exact(self, change: Change | None = None) -> Tensors:
        def wide(x: torch.Tensor) -> torch.Tensor:
            x = x.double()
            return x if change is None else change(x)

        given = Given(self._sources, self._types, self._parameters, self._ne, wide)
        with formula():
            made = self._computed(given)
        return {"0": self._ordered(made)}

    def _computed(self, given: Given) -> torch.Tensor:
        product = _PRODUCTS.get(self._op)
        if product is None:
            return FORMULAS[self._op](given)
        ways = products.roundings(self._op, given)
        made = [product(given, rounded) for rounded in ways]
        return min(made, key=self._distance)

    def _distance(self, made: torch.Tensor) -> float:
        recorded = self.recorded.get("0")
        if recorded is None or recorded.shape != made.shape:
            return 0.0
        return float((recorded.double() - made).nan_to_num(0.0, 0.0, 0.0).norm())

    def _ordered(self, made: torch.Tensor) -> torch.Tensor:
        return made.sort(-1).values if self._op in _SETS else made

    def again(self, device: str = "cpu") -> Tensors:
        raise CannotReplay("nodes of ggml can't run here")


def _facts(side: Side, key: CallKey) -> NodeFacts:
    """Raises CannotReplay: the run does not tell what the node reads."""
    _, text = side.scalars(key, ROLE).get(FACTS, ("", None))
    if text is None:
        raise CannotReplay("what it reads was not recorded; record it again", GAP)
    try:
        return ggml.read(text)
    except ValueError:
        raise CannotReplay("what it reads can't be read from the recording", GAP) from None
