"""Which tensor of a GGUF file answers to which of a checkpoint: by gguf's own map of names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from llmdebug_nb.capture.engines import gguf_values
from llmdebug_nb.capture.engines.gguf_file import GGUFFile, Stored, package

_SUFFIXES = (".weight", ".bias")
_LAYER = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"(\.experts)\.(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Piece:
    """What a file has of one tensor of a checkpoint: a tensor, one expert of it, or two in a row.

    ``expert``: its number in stacked experts.
    """

    parts: tuple[Stored, ...]
    expert: int | None = None

    @property
    def kind(self) -> str:
        """Return ggml's names of its types."""
        return " + ".join(dict.fromkeys(each.kind for each in self.parts))

    def value(self) -> torch.Tensor | None:
        """Return the values; None if one can't be dequantised."""
        found = [gguf_values.value(each) for each in self.parts]
        if len(found) == 1:
            return found[0]
        known = [each for each in found if each is not None]
        return torch.cat(known, 1) if len(known) == len(found) else None

    def span(self, weighted: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return which originals its quantisation explains; None if that is unknown."""
        found = [gguf_values.span(each, weighted) for each in self.parts]
        if len(found) == 1:
            return found[0]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        return torch.cat([low for low, _ in known], 1), torch.cat([high for _, high in known], 1)


def wanted(names: Iterable[str], file: GGUFFile) -> dict[str, tuple[str, ...]]:
    """Return the tensors that gguf's map gives for each name of a checkpoint; () if it has none."""
    known = tuple(names)
    gguf = package(file.name)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}.get(
        file.text("general.architecture")
    )
    if arch is None:
        return dict.fromkeys(known, ())
    layers = {int(found) for name in known for found in _LAYER.findall(name)[:1] if len(found) < 6}
    # a layer has a weight at least: a hostile number of layers makes no table
    count = min(max(layers, default=0) + 1, len(known) + 1)
    table = gguf.get_tensor_name_map(arch, count)

    def one(name: str) -> tuple[str, ...]:
        plain = _EXPERT.sub(r"\1", name)
        if found := table.get_name(plain, try_suffixes=_SUFFIXES):
            stacked = plain != name or (".experts." in name and not name.endswith(_SUFFIXES))
            return (found if found.endswith(_SUFFIXES) or not stacked else f"{found}.weight",)
        if "gate_up_proj" not in plain:
            return ()
        halves = [plain.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
        found_ = [table.get_name(half, try_suffixes=_SUFFIXES) for half in halves]
        return tuple(f"{each.removesuffix('.weight')}.weight" for each in found_ if each)

    return {name: one(name) for name in known}


def pieces(names: Iterable[str], file: GGUFFile) -> dict[str, Piece]:
    """Return what the file has of each name of a checkpoint; what it lacks is left out."""
    found = dict[str, Piece]()
    for name, targets in wanted(names, file).items():
        stored = [file.tensors[each] for each in targets if each in file.tensors]
        if not stored or len(stored) < len(targets):
            continue
        fitting = _EXPERT.search(name)
        expert = int(fitting[2]) if fitting and len(fitting[2]) < 6 else None
        if expert is None:
            found[name] = Piece(tuple(stored))
        elif all(len(each.shape) == 3 and expert < each.shape[0] for each in stored):
            found[name] = Piece(tuple(_expert(each, expert) for each in stored), expert)
    return found


def _expert(stored: Stored, number: int) -> Stored:
    """Return one expert of a tensor of stacked ones."""
    size = len(stored.raw) // stored.shape[0]
    raw = stored.raw[number * size : (number + 1) * size]
    return replace(stored, shape=stored.shape[1:], raw=raw)
