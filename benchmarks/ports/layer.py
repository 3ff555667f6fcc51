"""Qwen2 with one part written anew: the attention of a layer, or a whole decoder layer."""

from __future__ import annotations

import copy
from types import ModuleType

import torch

from ports.bugs import bugs
from ports.entry import Port
from ports.steps import decode
from ports.weights import Model, State, hugging_face, llama_norms
from ports.written import CODE

N = 2  # the layer that is written anew
LAYER = f"model.layers.{N}"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
NORMS = (f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm")
HEAD = 16
SETTINGS = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}


def with_attention(code: ModuleType, hf: Model) -> Model:
    model = copy.deepcopy(hf)
    model.model.layers[N].self_attn = code.FastAttention(model.model.layers[N].self_attn)
    return model


def with_layer(code: ModuleType, hf: Model) -> Model:
    model = copy.deepcopy(hf)
    model.model.layers[N] = code.Layer(hf.config, N)
    return model


def fused(hf: Model) -> State:
    """Return the weights with those of one layer under the port's names."""
    state = {name: value for name, value in hf.state_dict().items() if f"{LAYER}." not in name}
    old = hf.model.layers[N]
    projections = (old.self_attn.q_proj, old.self_attn.k_proj, old.self_attn.v_proj)
    ours = {
        "qkv.weight": torch.cat([each.weight for each in projections]),
        "qkv.bias": torch.cat([each.bias for each in projections]),
        "out.weight": old.self_attn.o_proj.weight,
        "gate_up.weight": torch.cat([old.mlp.gate_proj.weight, old.mlp.up_proj.weight]),
        "down.weight": old.mlp.down_proj.weight,
        "attention_scale": old.input_layernorm.weight,
        "mlp_scale": old.post_attention_layernorm.weight,
    }
    return {**state, **{f"{LAYER}.{name}": value for name, value in ours.items()}}


def keys_swapped(rows: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Swap the two key heads, which begin at a row."""
    return torch.cat([rows[:first], *rows[first:].split(HEAD)[1::-1], rows[first + 2 * HEAD :]])


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
    weights each(keys_swapped, f"{ATTENTION}.k_proj")
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
    weights each(lambda w: keys_swapped(w, first=64), f"{LAYER}.qkv")
    in $LAYER.qkv $ATTENTION.k_proj
norms_swapped: the norms' weights are swapped
    weights swap(f"{LAYER}.attention_scale", f"{LAYER}.mlp_scale")
    in $LAYER $NORMS
halves_swapped: the fused weight has up before gate
    weights each(lambda w: w.roll(len(w) // 2, 0), f"{LAYER}.gate_up.weight")
    in $LAYER.gate_up $MLP.gate_proj $MLP.up_proj
"""
PORTS = tuple(
    Port(
        name,
        CODE / file,
        hugging_face("Qwen2ForCausalLM", SETTINGS),
        make,
        convert,
        decode,
        decode,
        llama_norms,
        bugs(text, globals()),
    )
    for name, file, make, convert, text in (
        ("attention", "attention.py", with_attention, lambda hf: hf.state_dict(), ATTENTION_BUGS),
        ("layer", "decoder_layer.py", with_layer, fused, LAYER_BUGS),
    )
)
