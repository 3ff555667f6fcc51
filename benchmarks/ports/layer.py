"""Qwen2 with one part written anew: the attention of a layer, or a whole decoder layer."""

from __future__ import annotations

import copy
from types import ModuleType

import torch

from ports.made import CODE, SMALLER, made
from ports.steps import decode
from ports.weights import Model, State, renamed

N = 2  # the layer that is written anew
LAYER = f"model.layers.{N}"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
NORMS = (f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm")
SETTINGS = SMALLER | {
    "intermediate_size": 160, "num_hidden_layers": 4, "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}  # fmt: skip


def with_attention(code: ModuleType, hf: Model) -> Model:
    model = copy.deepcopy(hf)
    model.model.layers[N].self_attn = code.FastAttention(model.model.layers[N].self_attn)
    return model


def with_layer(code: ModuleType, hf: Model) -> Model:
    model = copy.deepcopy(hf)
    model.model.layers[N] = code.Layer(hf.config, N)
    return model


OURS = {
    f"{LAYER}.qkv": f"{ATTENTION}.{{q,k,v}}_proj",
    f"{LAYER}.out": f"{ATTENTION}.o_proj",
    f"{LAYER}.gate_up": f"{MLP}.{{gate,up}}_proj",
    f"{LAYER}.down": f"{MLP}.down_proj",
    f"{LAYER}.{{attention,mlp}}_scale": f"{LAYER}.{{input,post_attention}}_layernorm.weight",
}


def fused(hf: Model) -> State:
    """Return the weights with those of one layer under the port's names."""
    given = hf.state_dict()
    others = {name: value for name, value in given.items() if f"{LAYER}." not in name}
    return others | renamed(given, OURS)


ATTENTION_BUGS = r"""
k_repeat: key heads are repeated in the wrong order
    - k = k.repeat_interleave(self.groups, dim=1)
    + k = k.repeat(1, self.groups, 1, 1)
    in $ATTENTION
v_repeat: value heads are repeated in the wrong order
    - v = v.repeat_interleave(self.groups, dim=1)
    + v = v.repeat(1, self.groups, 1, 1)
    in $ATTENTION
no_sqrt: scores are divided by the size of a head, not its root
    - math.sqrt(self.head_dim)
    + self.head_dim
    in $ATTENTION
rotate_sign: RoPE negates the wrong half
    - torch.cat((-b, a), dim=-1)
    + torch.cat((b, -a), dim=-1)
    in $ATTENTION
no_mask: the causal mask is not added
    - scores = scores + attention_mask[..., : k.shape[-2]]
    + pass
    in $ATTENTION
    golden $ATTENTION/Tensor.add@eager_attention_forward
softmax_axis: softmax goes over the queries
    - scores.softmax(dim=-1,
    + scores.softmax(dim=-2,
    in $ATTENTION
k_sign: keys are rotated backwards
    - k = k * cos + rotate_half(k) * sin
    + k = k * cos - rotate_half(k) * sin
    in $ATTENTION
transpose: heads are not moved back before they are joined
    - (p @ v).transpose(1, 2).reshape(b, t, -1)
    + (p @ v).reshape(b, t, -1)
    in $ATTENTION
cos_sin: cos and sin are taken for each other
    - cos, sin = (x.unsqueeze(1)
    + sin, cos = (x.unsqueeze(1)
    in $ATTENTION
    also q = q * cos
sigmoid: a sigmoid for the softmax
    - p = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    + p = torch.sigmoid(scores.float()).to(q.dtype)
    in $ATTENTION
k_heads: the weight's key heads are in another order
    weights each(lambda w: reordered(w, (1, 0)), f"{ATTENTION}.k_proj")
    in $ATTENTION.k_proj
layer_off: the output projection is that of the layer before
    weights swap(f"{ATTENTION}.o_proj", "model.layers.1.self_attn.o_proj")
    in $ATTENTION.o_proj model.layers.1.self_attn.o_proj
"""
LAYER_BUGS = r"""
norm_no_root: the norm divides by the mean square, not its root
    - (h.square().mean(-1, keepdim=True) + eps).sqrt()
    + (h.square().mean(-1, keepdim=True) + eps)
    in $LAYER $NORMS
key_value: keys and values are split in the wrong order
    - q, k, v = self.qkv(x)
    + q, v, k = self.qkv(x)
    in $LAYER $ATTENTION
    also k = turn(
    also v.transpose(1, 2), self.index
turn_sign: RoPE turns the second half backwards
    - b * cos + a * sin
    + b * cos - a * sin
    in $LAYER $ATTENTION
cos_sin: cos and sin are swapped for keys
    - turn(k, cos, sin)
    + turn(k, sin, cos)
    in $LAYER $ATTENTION
groups: query heads go to the wrong key heads
    - q = q.view(b, t, self.kv_heads, self.groups, self.head_dim)
    + q = q.view(b, t, self.groups, self.kv_heads, self.head_dim).transpose(2, 3)
    in $LAYER $ATTENTION
    also scores = torch.einsum
no_scale: scores are not scaled
    - , q, k) * self.scale
    + , q, k)
    in $LAYER $ATTENTION
no_mask: the causal mask is not added
    - scores = scores + attention_mask[:, :, None]
    + pass
    in $LAYER $ATTENTION
    golden $ATTENTION/Tensor.add@eager_attention_forward
mask_shift: the mask is one place off
    - attention_mask[:, :, None]
    + attention_mask[:, :, None].roll(1, dims=-1)
    in $LAYER $ATTENTION
sum_axis: softmax sums over the queries
    - e / e.sum(-1,
    + e / e.sum(-2,
    in $LAYER $ATTENTION
join_order: groups and key heads are joined in the wrong order
    - ->btkgd
    + ->btgkd
    in $LAYER $ATTENTION
no_residual: the residual is not added after attention
    - h = hidden_states + self.out(out)
    + h = self.out(out)
    in $LAYER
    golden $LAYER/Tensor.add
stale_norm: the second norm takes the layer's input
    - normalise(h, self.mlp_scale
    + normalise(hidden_states, self.mlp_scale
    in $LAYER $LAYER.post_attention_layernorm
gate_up: gate and up are swapped
    - gate, up = self
    + up, gate = self
    in $LAYER $MLP
    also F.silu(gate)
gelu: GELU for SiLU
    - F.silu(gate)
    + F.gelu(gate)
    in $LAYER $MLP $MLP.act_fn
k_heads: the weight's key heads are in another order
    weights each(lambda w: reordered(w, (0, 2, 1, 3), [64, 16, 16, 32]), f"{LAYER}.qkv")
    in $LAYER.qkv $ATTENTION.k_proj
norms_swapped: the norms' weights are swapped
    weights swap(f"{LAYER}.attention_scale", f"{LAYER}.mlp_scale")
    in $LAYER $NORMS
halves_swapped: the fused weight has up before gate
    weights each(lambda w: w.roll(len(w) // 2, 0), f"{LAYER}.gate_up.weight")
    in $LAYER.gate_up $MLP.gate_proj $MLP.up_proj
"""
PORTS = tuple(
    made(
        globals(),
        name,
        "Qwen2ForCausalLM",
        text,
        source=CODE / file,
        make=make,
        convert=convert,
        work=decode,
    )
    for name, file, make, convert, text in (
        ("attention", "attention.py", with_attention, torch.nn.Module.state_dict, ATTENTION_BUGS),
        ("layer", "decoder_layer.py", with_layer, fused, LAYER_BUGS),
    )
)
