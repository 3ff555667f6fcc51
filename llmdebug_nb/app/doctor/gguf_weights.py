"""The weights of a checkpoint against those of a GGUF file: what the conversion did to each."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from llmdebug_nb.app.doctor import conversions, setups
from llmdebug_nb.app.doctor.conversions import Held
from llmdebug_nb.app.doctor.gguf_names import Piece, pieces, wanted
from llmdebug_nb.app.doctor.gguf_setup import GGUFSetup, config
from llmdebug_nb.core.bars import progress_bar
from llmdebug_nb.core.setups import Setup

Found = tuple[str, str, str]  # name of a symptom, and what checkpoint and file say
# what llama.cpp's graphs take (llama_model_rope_type and build_norm), which no file says
_PAIRS = {"llama"}  # neighbours turn together: rows of q and k are reordered
_HALVES = {"qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3"}
_ONE_MORE = {"gemma", "gemma2", "gemma3"}  # 1 + weight in transformers, weight in llama.cpp
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NAMES = 4
_HOLDS = "it holds "
_UNREAD = "the values of one side are unknown"
_EXPERT = re.compile(r"(\.experts)\.(\d+)\.")
_LAYER = re.compile(r"(?<=layers)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A weight that is not what it should be. ``words``: what the file holds in place of it."""

    what: str
    name: str
    right: str
    kind: str
    words: str


class Conversion:
    """Compares each weight of a checkpoint with what a GGUF file has of it.

    ``settings``: those of config.json, which says how many heads there should be.
    """

    def __init__(self, golden: Setup, mine: GGUFSetup, settings: Mapping[str, str]) -> None:
        self._settings = settings
        self._golden, self._mine, self._file = golden, mine, mine.file
        self._arch = self._file.text("general.architecture")
        self._weighted = "quantize.imatrix.file" in self._file.metadata
        both = isinstance(golden, GGUFSetup)
        self._pieces = (
            {name: Piece((each,)) for name, each in self._file.tensors.items()}
            if both else pieces(golden.weights, self._file)
        )  # fmt: skip
        self._same_names = both
        self.compared = 0
        self.not_compared: Counter[str] = Counter()

    def found(self, progress: bool) -> Iterator[Found]:
        """Yield what differs, and count the rest."""
        both = [name for name in self._golden.weights if name in self._pieces]
        bar = progress_bar(both, desc="weights", unit="tensor", shown=progress)
        yield from self._together([each for name in bar for each in self._weight(name)])
        yield from self._lacking()
        yield from self._unexpected()

    # -- a weight -------------------------------------------------------------------------------

    def _weight(self, name: str) -> Iterator[_Wrong]:
        piece = self._pieces[name]
        plain, held = self._plain(name), self._held(piece)
        if plain is None or held is None:
            why = f"{piece.kind} has no equal steps" if held is None else _UNREAD
            self.not_compared[f"weights: {why}"] += 1
            return
        self.compared += 1
        if plain.squeeze().shape == held.value.squeeze().shape:
            plain = plain.reshape(held.value.shape)
        form = self._form(name, plain)
        if form is not None and held.fits(form):
            return
        words = self._cause(name, plain, held)
        if form is None and "rows are" in words:  # any of both orders may be right
            self.not_compared[f"weights: order of rows of q and k: {self._arch} is unknown"] += 1
            return
        if plain.shape != held.value.shape:
            stored = f"{list(held.value.shape)}: {words or _common_rows(plain, held)}"
            yield _Wrong("shape", name, str(list(plain.shape)), piece.kind, stored)
        elif words:
            yield _Wrong("values", name, "another form of them", piece.kind, words)
        else:
            right = plain if form is None else form
            golden = f"norm {float(right.norm()):.6g}"
            yield _Wrong("values", name, golden, piece.kind, conversions.amount(held, right))

    def _together(self, wrong: list[_Wrong]) -> Iterator[Found]:
        """Yield what is wrong; the same of several weights is one finding."""
        groups: dict[tuple[str, str], list[_Wrong]] = defaultdict(list)
        for each in wrong:
            words = _EXPERT.sub(r"\1.N.", _LAYER.sub(".N.", each.words))
            groups[each.what, words].append(each)
        for (what, _), alike in groups.items():
            if orders := self._experts(alike):
                yield from orders
                continue
            first = alike[0]
            some = ", ".join(each.name for each in alike[:_NAMES])
            count = "" if len(alike) == 1 else f"{len(alike):,} weights: "
            more = " …" if len(alike) > _NAMES else ""
            kinds = " + ".join(dict.fromkeys(each.kind for each in alike))
            yield f"{what} of {count}{some}{more}", first.right, f"{kinds}: {first.words}"

    def _experts(self, alike: list[_Wrong]) -> list[Found]:
        """Return a finding for each tensor of experts in another order; [] if it is none."""
        stacks: dict[str, dict[int, int]] = defaultdict(dict)
        for each in alike:
            number, holds = self._pieces[each.name].expert, _EXPERT.search(each.words)
            own = _EXPERT.sub(r"\1.N.", each.name)
            if number is None or not holds or _EXPERT.sub(r"\1.N.", each.words) != _HOLDS + own:
                return []
            stacks[own][number] = int(holds[2])
        found = list[Found]()
        for name, moved in stacks.items():
            count = 1 + max([*moved, *moved.values()])
            order = ", ".join(str(moved.get(each, each)) for each in range(count))
            words = f"experts in another order: {order}"
            found.append((f"values of {name}", "another form of them", words))
        return found

    def _plain(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None
        if isinstance(self._golden, GGUFSetup):
            found = Piece((self._golden.file.tensors[name],)).value()
        else:
            found = setups.value_of(self._golden.weights[name])
        if found is None or not found.is_floating_point():
            return None
        return found.detach().cpu().double() if found.numel() < 1 << 20 else found.detach().cpu()

    def _held(self, piece: Piece) -> Held | None:
        value, span = piece.value(), piece.span(self._weighted)
        if value is None or span is None:
            return None
        return Held(value, span[0], span[1], self._weighted)

    def _form(self, name: str, plain: torch.Tensor) -> torch.Tensor | None:
        """Return what the file should hold of a weight; None if two answers may be right."""
        stored = self._stored_name(name)
        if self._same_names:
            return plain
        if heads := self._heads(stored):
            if self._arch in _PAIRS:
                fits = conversions.divides(heads, plain)
                return conversions.paired(plain, heads) if fits else None
            return plain if self._arch in _HALVES else None
        return plain + 1 if self._one_more(stored) else plain

    def _one_more(self, stored: str) -> bool:
        """Tell whether llama.cpp's norm multiplies by a weight to which 1 was added."""
        is_norm = "norm" in stored and stored.endswith(".weight") and not self._same_names
        return is_norm and self._arch in _ONE_MORE

    def _stored_name(self, name: str) -> str:
        return self._pieces[name].parts[0].name

    def _heads(self, stored: str) -> int:
        """Return how many heads a tensor of q or k has; 0 for any other."""
        part = stored.split(".")[-2] if "." in stored else ""
        if part not in ("attn_q", "attn_k"):
            return 0
        names = ["num_attention_heads"], ["num_key_value_heads", "num_attention_heads"]
        for name in names[part == "attn_k"]:
            if (found := self._settings.get(name, "")).isdecimal():
                return int(found)
        keys = ["head_count"], ["head_count_kv", "head_count"]
        for key in keys[part == "attn_k"]:
            if number := self._file.number(f"{self._arch}.attention.{key}"):
                return int(number)
        return 0

    def _cause(self, name: str, plain: torch.Tensor, held: Held) -> str:
        stored = self._stored_name(name)
        heads = self._heads(stored)
        forms: Iterator[tuple[str, torch.Tensor]] = iter(())
        if heads:
            forms = conversions.orders(plain, heads)
        elif self._one_more(stored):
            forms = iter([("1 is not added to it", plain), ("1 is added to it twice", plain + 2)])
        return conversions.cause(held, plain, forms, partial(self._others, name, held, plain))

    def _others(
        self, name: str, held: Held, plain: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the other weights of the checkpoint that the file may hold here."""
        for other, weight in self._golden.weights.items():
            if other == name or held.value.shape not in (weight.shape, weight.shape[::-1]):
                continue
            found = self._plain(other)
            if found is None:
                continue
            yield f"{_HOLDS}{other}", found
            heads = self._heads(self._stored_name(other)) if other in self._pieces else 0
            if heads and conversions.divides(heads, found):
                yield f"{_HOLDS}{other}", conversions.paired(found, heads)
            if found.ndim == 1:
                yield f"{_HOLDS}{other}", found + 1

    # -- what one side lacks --------------------------------------------------------------------

    def _lacking(self) -> Iterator[Found]:
        """Yield the weights that the file lacks."""
        names = [name for name in self._golden.weights if name not in self._pieces]
        targets = {} if self._same_names else wanted(names, self._file)
        lost = list[str]()
        for name in names:
            weight = self._golden.weights[name]
            if not weight.saved or name.endswith("rotary_emb.inv_freq"):
                self.not_compared["weights: buffers that are computed, not saved"] += 1
            elif self._mine.partial:
                self.not_compared[f"weights: {self._mine.partial}"] += 1
            elif not targets.get(name) and not self._same_names:
                self.not_compared[
                    f"weights: gguf has no name for it in {self._arch or 'no architecture'}"
                ] += 1
            elif targets.get(name) == ("output.weight",) and self._is_embedding(name):
                self.not_compared["weights: tied to a weight that both have"] += 1
            else:
                lost.append(name)
        yield from self._of_one(lost, 0)

    def _is_embedding(self, head: str) -> bool:
        """Tell whether a head is the embedding, which llama.cpp takes where a file has no head."""
        mine, golden = self._pieces_of("token_embd.weight"), self._plain(head)
        held = self._held(mine) if mine else None
        return golden is not None and held is not None and held.fits(golden)

    def _pieces_of(self, stored: str) -> Piece | None:
        found = self._file.tensors.get(stored)
        return Piece((found,)) if found else None

    def _unexpected(self) -> Iterator[Found]:
        """Yield the tensors of the file that no weight of the checkpoint answers to."""
        taken = {part.name for piece in self._pieces.values() for part in piece.parts}
        left = [name for name in self._file.tensors if name not in taken]
        for name in [each for each in left if each in _COMPUTED]:
            left.remove(name)
            self.not_compared["weights: computed by the conversion"] += 1
        if "output.weight" in left and not self._same_names:
            left.remove("output.weight")
            yield from self._own_head()
        if self._golden.partial and left:
            self.not_compared[f"weights: {self._golden.partial}"] += len(left)
            return
        yield from self._of_one(left, 1)

    def _own_head(self) -> Iterator[Found]:
        """Yield a head that should be the embedding and is not."""
        embedding = next(
            (name for name in self._pieces if self._stored_name(name) == "token_embd.weight"), None
        )
        piece = self._pieces_of("output.weight")
        golden = None if embedding is None else self._plain(embedding)
        held = self._held(piece) if piece else None
        if golden is None or held is None:
            self.not_compared[f"weights: {_UNREAD}"] += 1
            return
        self.compared += 1
        if not held.fits(golden):
            words = conversions.amount(held, golden) if golden.shape == held.value.shape else ""
            says = f"output.weight has values of its own{': ' if words else ''}{words}"
            yield f"tied {embedding} = head", "one weight", says

    def _of_one(self, names: list[str], which: int) -> Iterator[Found]:
        if names:
            self.compared += len(names)
            some = ", ".join(names[:_NAMES]) + (" …" if len(names) > _NAMES else "")
            texts = [f"{len(names):,}: {some}", "none of them"]
            what = "missing in the GGUF file" if which == 0 else "unexpected in the GGUF file"
            yield what, *(texts if which == 0 else texts[::-1])  # type: ignore[misc]


def _common_rows(plain: torch.Tensor, held: Held) -> str:
    """Return how the rows that both have compare."""
    rows = min(len(plain), len(held.value)) if plain.ndim and held.value.ndim else 0
    if not rows or plain.shape[1:] != held.value.shape[1:]:
        return "another tensor"
    part = Held(held.value[:rows], held.low[:rows], held.high[:rows], held.weighted)
    return f"the first {rows:,} rows are {'the same' if part.fits(plain[:rows]) else 'others'}"


def met(golden: Setup, mine: Setup) -> tuple[Setup, Setup, Conversion | None, bool]:
    """Return both with the settings that both know, and how to compare weights if one is a file.

    The last: golden is the file, and mine the checkpoint.
    """
    if isinstance(mine, GGUFSetup):
        if isinstance(golden, GGUFSetup):
            return golden, mine, Conversion(golden, mine, {}), False
        settings = golden.facts.get("config", {})
        golden, mine = _common(golden, mine)
        return golden, mine, Conversion(golden, mine, settings), False
    if isinstance(golden, GGUFSetup):
        settings = mine.facts.get("config", {})
        other, file = _common(mine, golden)
        return file, other, Conversion(other, file, settings), True
    return golden, mine, None, False


def _common(checkpoint: Setup, file: GGUFSetup) -> tuple[Setup, GGUFSetup]:
    known = checkpoint.facts.get("config", {})
    golden, mine = config(file.file, known)
    facts = {**checkpoint.facts, "config": golden if known else {}}
    return replace(checkpoint, facts=facts), replace(file, facts={**file.facts, "config": mine})
