"""The same Llama in ATB's form with int8 weights and activations (W8A8), and its planted bugs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from atb_llama import AtbLlama

MOST = 127


@dataclass
class Int8AtbLlama(AtbLlama):
    """Linears of the layers take int8, made by the norm before them or by a node of its own.

    ``scales``: of the activations, by linear: (scale, zero), see `calibrated`. ``bug``: one of
    "wrong_scale", "clip", "zero_forgotten", "other_channel", in layer 1.
    """

    scales: dict[str, tuple[float, int]] = field(default_factory=dict)
    seen: dict[str, tuple[float, float]] = field(default_factory=dict)

    def calibrated(self, prompt: Tensor, new: int) -> None:
        """Run once without a dump's scales, and make them of the least and largest inputs."""
        self.generate(prompt, new)
        for name, (low, high) in self.seen.items():
            scale = (high - low) / (2 * MOST + 1)
            self.scales[name] = scale, round(-MOST - 1 - low / scale)
        self.caches.clear()
        self.round = 0

    def _norm(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        if "_layer" not in path:
            return super()._norm(path, x, weight)
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        made = x * root * weight
        name = self._linear_behind(path)
        if name not in self.scales:
            self._see(name, made)
            return made
        scale, zero = self.scales[name]
        parts = [x, weight, torch.tensor([scale]), torch.tensor([zero], dtype=torch.int8)]
        return self._op(path, parts, [self._stored(name, made)])

    def _linear(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        if "_layer" not in path:
            return super()._linear(path, x, weight)
        name = self._name(path)
        if name not in self.scales:
            self._see(name, x)
            return x @ weight.T
        scale, zero = self.scales[name]
        if x.dtype != torch.int8:
            given = [x, torch.tensor([scale]), torch.tensor([zero], dtype=torch.int8)]
            x = self._op(f"{path}_Quant", given, [self._stored(name, x)])
        steps = weight.float().abs().amax(1) / MOST
        stored = (weight / steps[:, None]).round().to(torch.int8)
        forgotten = self.bug == "zero_forgotten" and name == "1_down"
        bias = -stored.int().sum(1, dtype=torch.int32) * (0 if forgotten else zero)
        deq = steps.float() * scale
        if self.bug == "other_channel" and name == "1_gate_up":
            deq = deq.roll(1)
        made = ((x.int() @ stored.int().T + bias) * deq.float()).to(weight.dtype)
        return self._op(path, [x, stored, bias, deq], [made])

    def _stored(self, name: str, x: Tensor) -> Tensor:
        scale, zero = self.scales[name]
        if self.bug == "wrong_scale" and name == "1_qkv":
            scale *= 1.25
        low, high = -MOST - 1, MOST
        if self.bug == "clip" and name == "1_down":
            low, high = -100, 100
        return ((x / scale).round() + zero).clamp(low, high).to(torch.int8)

    def _see(self, name: str, x: Tensor) -> None:
        low, high = self.seen.get(name, (0.0, 0.0))
        self.seen[name] = min(low, float(x.min())), max(high, float(x.max()))

    @staticmethod
    def _name(path: str) -> str:
        layer = int(path.split("_", maxsplit=1)[0]) - 2
        kinds = {"0_Attention/1": "qkv", "0_Attention/5": "o", "2_Mlp/1": "gate_up"}
        inside = path.split("/", 1)[1].rsplit("_", 1)[0]
        return f"{layer}_{kinds.get(inside, 'down')}"

    def _linear_behind(self, path: str) -> str:
        return self._name(path.rsplit("/", 1)[0] + "/1_Linear")

    def _op(self, path: str, given: list[Tensor], made: list[Tensor]) -> Tensor:
        return super()._op(path, given, made) if self.scales else made[0]
