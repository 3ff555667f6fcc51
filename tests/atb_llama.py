"""A Llama's generation in ATB's form, dumped as its probe does: flat tokens, packed projections.

It is computed anew from the weights of a Transformers model, with two graphs: prefill and decode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from test_layout_atb import bin_bytes

Cache = tuple[Tensor, Tensor]


@dataclass
class AtbLlama:
    """``model``: of Transformers; ``base``: the folder of the process; ``bug``: of layer 1."""

    model: torch.nn.Module
    base: Path
    bug: str = ""
    round: int = 0
    caches: dict[int, Cache] = field(default_factory=dict)

    def generate(self, prompt: Tensor, new: int, warmup: bool = False) -> list[int]:
        """Return the tokens after a prompt (int64[tokens]), of the likeliest each."""
        if warmup:
            self._run(torch.arange(8), "Prefill")
            self.caches.clear()
            self.round = 1
        made = [int(self._run(prompt, "Prefill")[-1].argmax())]
        for _ in range(new - 1):
            made.append(int(self._run(torch.tensor(made[-1:]), "Decoder")[-1].argmax()))
            self.round += 1
        return made

    def _run(self, ids: Tensor, kind: str) -> Tensor:
        weights, config = self.model.state_dict(), self.model.config
        seen = self.caches[0][0].shape[0] if self.caches else 0
        embedding = weights["model.embed_tokens.weight"]
        x = self._op("0_WordEmbedding", [embedding, ids], [embedding[ids]])
        angles = (torch.arange(len(ids)) + seen)[:, None] * self._frequencies()
        angles = torch.cat([angles, angles], -1)
        self._op("1_PositionalEmbedding", [], [angles.cos(), angles.sin()])
        for layer in range(config.num_hidden_layers):
            x = self._layer(f"{layer + 2}_{kind}_layer", layer, x, angles)
        last = config.num_hidden_layers + 2
        x = self._norm(f"{last}_RmsNorm", x, weights["model.norm.weight"])
        if kind == "Prefill":
            last += 1
            x = self._op(f"{last}_Gather", [x, torch.tensor([len(x) - 1])], [x[-1:]])
        return self._linear(f"{last + 1}_LmHead", x, weights["lm_head.weight"])

    def _frequencies(self) -> Tensor:
        rotary = self.model.model.rotary_emb
        return rotary.inv_freq.float()

    def _layer(self, path: str, layer: int, given: Tensor, angles: Tensor) -> Tensor:
        prefix, weights = f"model.layers.{layer}.", self.model.state_dict()
        own = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        attended = self._attention(f"{path}/0_Attention", layer, given, angles, own)
        x = self._op(f"{path}/1_ElewiseAdd", [given, attended], [given + attended])
        made = self._mlp(f"{path}/2_Mlp", layer, x, own)
        x = self._op(f"{path}/3_ElewiseAdd", [x, made], [x + made])
        return self._op(path, [given], [x])

    def _attention(
        self, path: str, layer: int, given: Tensor, angles: Tensor, own: dict[str, Tensor]
    ) -> Tensor:
        config = self.model.config
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        width = config.hidden_size // heads
        x = self._norm(f"{path}/0_RmsNorm", given, own["input_layernorm.weight"])
        packed = torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"])
        qkv = self._linear(f"{path}/1_Linear", x, packed)
        q, k, v = qkv.split([heads * width, shared * width, shared * width], -1)
        self._op(f"{path}/2_Split", [qkv], [q, k, v])
        turned = [self._turned(part, angles, width) for part in (q, k)]
        if self.bug == "keys_not_turned" and layer == 1:
            turned[1] = k
        self._op(f"{path}/3_Rope", [q, k, angles.cos(), angles.sin()], turned)
        keys, values = (t.view(-1, shared, width) for t in (turned[1], v))
        if layer in self.caches:
            before = self.caches[layer]
            keys, values = torch.cat([before[0], keys]), torch.cat([before[1], values])
        self.caches[layer] = keys, values
        result = self._attended(layer, turned[0].view(-1, heads, width), keys, values)
        self._op(f"{path}/4_SelfAttention", [turned[0], keys, values], [result])
        result = self._linear(f"{path}/5_Linear", result, own["self_attn.o_proj.weight"])
        return self._op(path, [given], [result])

    def _attended(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        copies = q.shape[1] // keys.shape[1]
        keys, values = (t.repeat_interleave(copies, 1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
        if self.bug == "scale" and layer == 1:
            scores = scores * math.sqrt(2)
        first = len(keys) - len(q)
        masked = torch.arange(len(keys)) > (torch.arange(len(q)) + first)[:, None]
        weights = scores.masked_fill(masked, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def _mlp(self, path: str, layer: int, given: Tensor, own: dict[str, Tensor]) -> Tensor:
        x = self._norm(f"{path}/0_RmsNorm", given, own["post_attention_layernorm.weight"])
        packed = torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
        both = self._linear(f"{path}/1_Linear", x, packed)
        gate, up = both.chunk(2, -1)
        if self.bug == "gate_and_up_swapped" and layer == 1:
            gate, up = up, gate
        x = self._op(f"{path}/2_Swiglu", [both], [F.silu(gate) * up])
        return self._op(
            path, [given], [self._linear(f"{path}/3_Linear", x, own["mlp.down_proj.weight"])]
        )

    @staticmethod
    def _turned(x: Tensor, angles: Tensor, width: int) -> Tensor:
        heads = x.view(len(x), -1, width)
        low, high = heads.chunk(2, -1)
        cos, sin = (turn[:, None].to(x.dtype) for turn in (angles.cos(), angles.sin()))
        return (heads * cos + torch.cat([-high, low], -1) * sin).flatten(1)

    def _norm(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return self._op(path, [x, weight], [x * scale * weight])

    def _linear(self, path: str, x: Tensor, weight: Tensor) -> Tensor:
        return self._op(path, [x, weight], [x @ weight.T])

    def _op(self, path: str, given: list[Tensor], made: list[Tensor]) -> Tensor:
        """Append an operation's tensors to its files; return the first that it made."""
        for when, name, tensors in (("before", "in", given), ("after", "out", made)):
            for number, tensor in enumerate(tensors):
                file = self.base / str(self.round) / path / when / f"{name}tensor{number}.bin"
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab") as stream:
                    stream.write(bin_bytes(tensor.contiguous()))
        return made[0]
