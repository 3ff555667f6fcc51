"""The weights of golden, the same ones under mine's names, and mistakes in them.

A name is that of a weight, or of a module: then all weights in it are meant. A star in it stands
for any one part, as the number of a layer, and ``{a,b}`` for each of several texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

import torch
import transformers

Model = Any
State = dict[str, torch.Tensor]
Change = Callable[[State], None]
Norms = Callable[[Model], Iterable[tuple[Model, list[Model]]]]

# -- names ---------------------------------------------------------------------------------------


def several(names: str) -> list[str]:
    """Return the names that some with braces, with spaces between them, stand for."""

    def opened(name: str) -> list[str]:
        head, _, rest = name.partition("{")
        inside, brace, tail = rest.partition("}")
        texts = inside.split(",")
        return [head + text + more for text in texts for more in opened(tail)] if brace else [name]

    return [name for each_name in names.split() for name in opened(each_name)]


def fitting(names: Iterable[str], name: str, *others: str) -> Iterator[list[str]]:
    """Yield each of the names that fits a name, and what the others are with the same parts."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"([^.]*)") + r"((?:\..*)?)")
    for each_name in list(names):
        if found := pattern.fullmatch(each_name):
            *stars, rest = found.groups()
            filled = (reduce(lambda o, star: o.replace("*", star, 1), stars, o) for o in others)
            yield [each_name, *(other + rest for other in filled)]


def renamed(given: State, names: dict[str, str]) -> State:
    """Return weights under other names. ``names``: theirs by ours.

    Several of theirs are renamed one by one if ours are as many, and else joined to one weight.
    """
    state: State = {}
    for ours, theirs in names.items():
        news, olds = several(ours), several(theirs)
        groups = [olds] if len(news) == 1 else [[old] for old in olds]
        for new, (first, *more) in zip(news, groups, strict=True):
            for found, name, *others in fitting(given, first, new, *more):
                parts = [given[other] for other in (found, *others)]
                state[name] = torch.cat(parts) if others else parts[0]
    return state


# -- mistakes ------------------------------------------------------------------------------------


def each(change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Change:
    """Return what changes each of some weights."""

    def convert(state: State) -> None:
        for name in several(" ".join(names)):
            for (found,) in fitting(state, name):
                state[found] = change(state[found]).clone()

    return convert


def swap(one: str, other: str) -> Change:
    """Return what gives each of two weights, or modules, the other's values."""

    def convert(state: State) -> None:
        for a, b in fitting(state, one, other):
            if b in state:
                state[a], state[b] = state[b], state[a]

    return convert


def copy(to: str, of: str) -> Change:
    """Return what gives a weight, or a module, the values of another one."""

    def convert(state: State) -> None:
        for a, b in fitting(state, to, of):
            state[a] = state[b].clone()

    return convert


def transpose(*names: str) -> Change:
    """Return what leaves the transposition of square weights out, or makes one too many."""
    return each(lambda weight: weight.T, *names)


def as_made(name: str) -> Change:
    """Return what leaves a norm as it is made, not loaded."""

    def convert(state: State) -> None:
        state[f"{name}.weight"].fill_(1)
        state[f"{name}.bias"].zero_()

    return convert


def turned(rows: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return rows that are ordered by a kinds, then b kinds, ordered by these b kinds first."""
    return rows.unflatten(0, (a, b, -1)).transpose(0, 1).flatten(0, 2)


def reordered(
    rows: torch.Tensor, order: tuple[int, ...], sizes: list[int] | None = None
) -> torch.Tensor:
    """Return the parts of rows in another order. ``sizes``: theirs, if they are not equal."""
    parts = rows.split(sizes) if sizes else rows.chunk(len(order))
    return torch.cat([parts[n] for n in order])


def zeroed(rows: torch.Tensor, start: int, end: int | None = None) -> torch.Tensor:
    """Return rows with some set to zero."""
    rows[start:end] = 0
    return rows


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Order the rows of each head for RoPE that turns neighbours, not the two halves."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def by_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo `interleaved`."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


# -- random weights that are like trained ones -----------------------------------------------------


def hugging_face(
    kind: str,
    settings: dict[str, Any],
    std: float = 0.0,
    stds: dict[str, float] | None = None,
    change: Callable[[Model], object] = lambda model: None,
    **given: bool,
) -> Callable[[int], Model]:
    """Return what makes a Hugging Face model of a seed, float32, in evaluation mode.

    ``std``: of weights with several axes, if the model's own is far below that of trained ones.
    ``stds``: that of weights with such a text in their names; 0: the model's own. ``change``:
    changes the model before norms and biases are spread. ``given``: more that the model takes.
    """

    def make(seed: int) -> Model:
        model_class = getattr(transformers, kind)
        config = model_class.config_class(**settings)
        torch.manual_seed(seed)
        model = model_class(config, **given)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                own = (value for text, value in (stds or {}).items() if text in name)
                if parameter.ndim > 1 and (chosen := next(own, std)):
                    parameter.normal_(0, chosen)
            change(model)
        return spread(model, seed)

    return make


def spread(model: Model, seed: int) -> Model:
    """Give norms and biases the spread of trained ones: all one and all zero hide bugs."""
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def add_outliers(
    norms: Iterable[tuple[Model, list[Model]]], seed: int, offset: float = 0.0
) -> None:
    """Multiply three channels of each norm by 30 to 100 and divide its consumers' weights.

    The model computes the same function. Trained language models have such channels.
    """
    generator = torch.Generator().manual_seed(2000 + seed)
    with torch.no_grad():
        for norm, consumers in norms:
            channels = torch.randperm(norm.weight.numel(), generator=generator)[:3]
            factors = 30 + 70 * torch.rand(3, generator=generator)
            norm.weight[channels] = (norm.weight[channels] + offset) * factors - offset
            if getattr(norm, "bias", None) is not None:
                norm.bias[channels] *= factors
            for consumer in consumers:
                weight = consumer if isinstance(consumer, torch.Tensor) else consumer.weight
                weight[..., channels] /= factors  # the input channels are the last axis


def norms_of(
    layers: str = "", takers: dict[str, str] | None = None, last: dict[str, str] | None = None
) -> Norms:
    """Return what yields the norms of each layer, and the last ones, with what takes their output.

    ``takers``: the names in a layer of modules or weights, by that of the norm. Those that a layer
    has not are left out. ``last``: such names in the model.
    """

    def part(root: Model, path: str) -> Model:
        return reduce(lambda at, name: getattr(at, name, None), path.split("."), root)

    def pairs(root: Model, table: dict[str, str] | None) -> Iterator[tuple[Model, list[Model]]]:
        for norm, names in (table or {}).items():
            found = [part(root, path) for path in several(names)]
            if part(root, norm) is not None:
                yield part(root, norm), [each_part for each_part in found if each_part is not None]

    def of(model: Model) -> Iterator[tuple[Model, list[Model]]]:
        for stack in several(layers):
            for layer in part(model, stack):
                yield from pairs(layer, takers)
        yield from pairs(model, last)

    return of


LLAMA = {
    "input_layernorm": "self_attn.{q,k,v}_proj",
    "post_attention_layernorm": "mlp.{gate_proj,up_proj,gate,experts.gate_up_proj}",
}
llama_norms = norms_of("model.layers", LLAMA, {"model.norm": "lm_head"})
