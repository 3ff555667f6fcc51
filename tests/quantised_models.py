"""A small transformer, and quantised forms of its linear layers, each with a way to be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, GROUP = 64, 32
PROMPT = torch.arange(24)[None] * 7 % 90
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the element that each 4 bits of an integer hold


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_norm(x)
        q, k, v = (
            each(h).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.post_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(90, WIDTH), nn.Linear(WIDTH, 90, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.12)
        nn.init.normal_(self.embed.weight, mean=0.3)
        for layer in self.layers:
            for norm in (layer.input_norm, layer.post_norm):
                nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def packed(codes: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    parts = codes.to(torch.int32).unflatten(axis, (-1, 8)).movedim(axis + 1, -1)
    return sum((parts[..., e] & 15) << (4 * i) for i, e in enumerate(order)).to(torch.int32)


def unpacked(codes: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    parts = [codes] * 8
    for place, element in enumerate(order):
        parts[element] = (codes >> (4 * place)) & 15
    return torch.stack(parts, axis + 1).flatten(axis, axis + 1)


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of 0 to 15, scales and zeros [out, in / group]."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(1, 15)
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(1), scale, zero


class Quantised(nn.Module):
    """``bug``: what the kernel does wrong."""

    def __init__(self, linear: nn.Linear, bug: str = "") -> None:
        super().__init__()
        self.bias, self.bug = linear.bias, bug
        self.store(linear.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bug == "bias" else self.bias
        return F.linear(self.rounded(x), self.floats().to(x.dtype), bias)

    def rounded(self, x: Tensor) -> Tensor:
        return x


class Gptq(Quantised):
    """Packed along the inputs; zeros less one, packed along the outputs."""

    def store(self, weight: Tensor) -> None:
        codes, scale, zero = four_bits(weight)
        self.register_buffer("qweight", packed(codes.t(), 0))
        self.register_buffer("qzeros", packed(zero.t() - 1, 1))
        self.register_buffer("scales", scale.t().contiguous())

    def floats(self) -> Tensor:
        zeros = unpacked(self.qzeros, 1) + (0 if self.bug == "file" else 1)
        spread = [x.repeat_interleave(GROUP, 0) for x in (zeros, self.scales)]
        return ((unpacked(self.qweight, 0) - spread[0]) * spread[1]).t()


class Awq(Quantised):
    """Packed along the outputs, interleaved."""

    def store(self, weight: Tensor) -> None:
        codes, scale, zero = four_bits(weight)
        self.register_buffer("qweight", packed(codes.t(), 1, AWQ))
        self.register_buffer("qzeros", packed(zero.t(), 1, AWQ))
        self.register_buffer("scales", scale.t().contiguous())

    def floats(self) -> Tensor:
        order = tuple(range(8)) if self.bug == "file" else AWQ
        zeros = unpacked(self.qzeros, 1, AWQ).repeat_interleave(GROUP, 0)
        steps = unpacked(self.qweight, 1, order) - zeros
        return (steps * self.scales.repeat_interleave(GROUP, 0)).t()


class HighFirst(Quantised):
    """Two in a byte, the first in the high bits, stored from 8 on."""

    def store(self, weight: Tensor) -> None:
        groups = weight.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(2) / 7
        codes = ((groups / scale[..., None]).round() + 8).flatten(1).to(torch.uint8)
        self.register_buffer("weight_packed", codes[:, 1::2] | (codes[:, ::2] << 4))
        self.register_buffer("weight_scale", scale)

    def floats(self) -> Tensor:
        parts = [self.weight_packed >> 4, self.weight_packed & 15]
        codes = torch.stack(parts[::-1] if self.bug == "file" else parts, 2).flatten(1)
        return (codes.float() - 8) * self.weight_scale.repeat_interleave(GROUP, 1)


class Float8(Quantised):
    """Floats of 8 bits, weights and, for each token, inputs."""

    def store(self, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / 448
        self.register_buffer("weight", (weight / scale).to(torch.float8_e4m3fn))
        self.register_buffer("weight_scale", scale)

    def floats(self) -> Tensor:
        scale = self.weight_scale
        return self.weight.float() * (scale.roll(1, 0) if self.bug == "file" else scale)

    def rounded(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class W8A8(Quantised):
    """Integers of 8 bits; inputs by the scale that the module states."""

    def store(self, weight: Tensor) -> None:
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.tensor(0.1))

    def floats(self) -> Tensor:
        scale = self.weight_scale
        return self.weight.float() * (scale.roll(1, 0) if self.bug == "file" else scale)

    def rounded(self, x: Tensor) -> Tensor:
        most = 20 if self.bug == "clip" else 127
        return (x / self.input_scale).round().clamp(-most, most) * self.input_scale


KINDS = {kind.__name__: kind for kind in (Gptq, Awq, HighFirst, Float8, W8A8)}
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def quantised(model: Model, kind: type[Quantised], bug: str = "", at: str = "") -> Model:
    """Return a model with quantised layers. ``at``: the one with the bug."""
    for number, layer in enumerate(model.layers):
        for name in LINEARS:
            own = bug if f"layers.{number}.{name}" == at else ""
            setattr(layer, name, kind(getattr(layer, name), own))
    return model


@torch.no_grad()
def folded(model: Model, forgotten: str = "") -> Model:
    """Return a model whose norms, values and ups gave factors to the weights behind them.

    ``forgotten``: the weight that lacks them.
    """
    for number, layer in enumerate(model.layers):
        for norm, takers in ((layer.input_norm, "qkv"), (layer.post_norm, ("gate", "up"))):
            factors = norm.weight.abs().sqrt()
            norm.weight /= factors
            for name in takers:
                if f"layers.{number}.{name}" != forgotten:
                    getattr(layer, name).weight *= factors
        generator = torch.Generator().manual_seed(number)
        for maker, taker in (("v", "o"), ("up", "down")):
            linear = getattr(layer, maker)
            factors = torch.rand(linear.out_features, generator=generator) * 2 + 0.5
            linear.weight /= factors[:, None]
            if linear.bias is not None:
                linear.bias /= factors
            if f"layers.{number}.{taker}" != forgotten:
                getattr(layer, taker).weight *= factors
    return model
