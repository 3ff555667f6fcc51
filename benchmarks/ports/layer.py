"""Qwen2 with one part written anew: the attention of a layer, or a whole decoder layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import transformers

from ports.entry import Bug, Model, Port, State, decode, llama_norms, spread

CODE = Path(__file__).with_name("code")
N = 2  # the layer that is written anew
LAYER = f"model.layers.{N}"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
HEAD = 16


def original(seed: int) -> Model:
    """Return Qwen2 with four layers; weights with the scale of trained ones."""
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.12,
        max_position_embeddings=256,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    return spread(transformers.Qwen2ForCausalLM(config), seed)


# -- changes of weights --------------------------------------------------------------------------


def heads(name: str, order: list[int], first: int = 0) -> Callable[[State], None]:
    """Return what puts the heads of a projection, from row ``first`` on, in another order."""

    def change(state: State) -> None:
        for what in (f"{name}.weight", f"{name}.bias"):
            part = state[what][first : first + len(order) * HEAD]
            part.copy_(torch.cat([part[HEAD * n : HEAD * (n + 1)] for n in order]))

    return change


def swap(a: str, b: str) -> Callable[[State], None]:
    """Return what swaps two weights."""

    def change(state: State) -> None:
        state[a], state[b] = state[b], state[a]

    return change


# -- the attention of a layer --------------------------------------------------------------------


def with_attention(code: ModuleType, hf: Model) -> Model:
    model = copy.deepcopy(hf)
    model.model.layers[N].self_attn = code.FastAttention(model.model.layers[N].self_attn)
    return model


def in_attention(name: str, what: str, old: str, new: str, **more: tuple[str, ...]) -> Bug:
    return Bug(name, what, old, new, modules=(ATTENTION,), **more)


ATTENTION_BUGS = (
    in_attention(
        "k_repeat",
        "key heads are repeated in the wrong order",
        "k = k.repeat_interleave(self.groups, dim=1)",
        "k = k.repeat(1, self.groups, 1, 1)",
    ),
    in_attention(
        "v_repeat",
        "value heads are repeated in the wrong order",
        "v = v.repeat_interleave(self.groups, dim=1)",
        "v = v.repeat(1, self.groups, 1, 1)",
    ),
    in_attention(
        "no_sqrt",
        "scores are divided by the size of a head, not its root",
        "math.sqrt(self.head_dim)",
        "self.head_dim",
    ),
    in_attention(
        "rotate_sign",
        "RoPE negates the wrong half",
        "torch.cat((-b, a), dim=-1)",
        "torch.cat((b, -a), dim=-1)",
    ),
    in_attention(
        "no_mask",
        "the causal mask is not added",
        "scores = scores + attention_mask[..., : k.shape[-2]]",
        "pass",
        golden=(f"{ATTENTION}/Tensor.add@eager_attention_forward",),
    ),
    in_attention(
        "softmax_axis",
        "softmax goes over the queries",
        "scores.softmax(dim=-1,",
        "scores.softmax(dim=-2,",
    ),
    in_attention(
        "k_sign",
        "keys are rotated backwards",
        "k = k * cos + rotate_half(k) * sin",
        "k = k * cos - rotate_half(k) * sin",
    ),
    in_attention(
        "transpose",
        "heads are not moved back before they are joined",
        "(p @ v).transpose(1, 2).reshape(b, t, -1)",
        "(p @ v).reshape(b, t, -1)",
    ),
    in_attention(
        "cos_sin",
        "cos and sin are taken for each other",
        "cos, sin = (x.unsqueeze(1)",
        "sin, cos = (x.unsqueeze(1)",
        also=("q = q * cos",),
    ),
    in_attention(
        "sigmoid",
        "a sigmoid for the softmax",
        "p = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)",
        "p = torch.sigmoid(scores.float()).to(q.dtype)",
    ),
    Bug(
        "k_heads",
        "the weight's key heads are in another order",
        convert=heads(f"{ATTENTION}.k_proj", [1, 0]),
        modules=(f"{ATTENTION}.k_proj",),
    ),
    Bug(
        "layer_off",
        "the output projection is that of the layer before",
        convert=swap(f"{ATTENTION}.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        modules=(f"{ATTENTION}.o_proj", "model.layers.1.self_attn.o_proj"),
    ),
)

# -- a decoder layer -----------------------------------------------------------------------------


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


def halves_swapped(state: State) -> None:
    """Put up before gate."""
    gate, up = state[f"{LAYER}.gate_up.weight"].chunk(2)
    state[f"{LAYER}.gate_up.weight"] = torch.cat((up, gate))


NORMS = (f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm")


def in_layer(
    name: str, what: str, old: str, new: str, *modules: str, **more: tuple[str, ...]
) -> Bug:
    """Return a bug in the layer's forward. ``modules``: of golden, around the same computation."""
    return Bug(name, what, old, new, modules=(LAYER, *modules), **more)


LAYER_BUGS = (
    in_layer(
        "norm_no_root",
        "the norm divides by the mean square, not its root",
        "(h.square().mean(-1, keepdim=True) + eps).sqrt()",
        "(h.square().mean(-1, keepdim=True) + eps)",
        *NORMS,
    ),
    in_layer(
        "key_value",
        "keys and values are split in the wrong order",
        "q, k, v = self.qkv(x)",
        "q, v, k = self.qkv(x)",
        ATTENTION,
        also=("k = turn(", "v.transpose(1, 2), self.index"),
    ),
    in_layer(
        "turn_sign",
        "RoPE turns the second half backwards",
        "b * cos + a * sin",
        "b * cos - a * sin",
        ATTENTION,
    ),
    in_layer(
        "cos_sin",
        "cos and sin are swapped for keys",
        "turn(k, cos, sin)",
        "turn(k, sin, cos)",
        ATTENTION,
    ),
    in_layer(
        "groups",
        "query heads go to the wrong key heads",
        "q = q.view(b, t, self.kv_heads, self.groups, self.head_dim)",
        "q = q.view(b, t, self.groups, self.kv_heads, self.head_dim).transpose(2, 3)",
        ATTENTION,
        also=("scores = torch.einsum",),
    ),
    in_layer("no_scale", "scores are not scaled", ", q, k) * self.scale", ", q, k)", ATTENTION),
    in_layer(
        "no_mask",
        "the causal mask is not added",
        "scores = scores + attention_mask[:, :, None]",
        "pass",
        ATTENTION,
        golden=(f"{ATTENTION}/Tensor.add@eager_attention_forward",),
    ),
    in_layer(
        "mask_shift",
        "the mask is one place off",
        "attention_mask[:, :, None]",
        "attention_mask[:, :, None].roll(1, dims=-1)",
        ATTENTION,
    ),
    in_layer(
        "sum_axis", "softmax sums over the queries", "e / e.sum(-1,", "e / e.sum(-2,", ATTENTION
    ),
    in_layer(
        "join_order",
        "groups and key heads are joined in the wrong order",
        "->btkgd",
        "->btgkd",
        ATTENTION,
    ),
    in_layer(
        "no_residual",
        "the residual is not added after attention",
        "h = hidden_states + self.out(out)",
        "h = self.out(out)",
        golden=(f"{LAYER}/Tensor.add",),
    ),
    in_layer(
        "stale_norm",
        "the second norm takes the layer's input",
        "normalise(h, self.mlp_scale",
        "normalise(hidden_states, self.mlp_scale",
        NORMS[1],
    ),
    in_layer(
        "gate_up",
        "gate and up are swapped",
        "gate, up = self",
        "up, gate = self",
        MLP,
        also=("F.silu(gate)",),
    ),
    in_layer("gelu", "GELU for SiLU", "F.silu(gate)", "F.gelu(gate)", MLP, f"{MLP}.act_fn"),
    Bug(
        "k_heads",
        "the weight's key heads are in another order",
        convert=heads(f"{LAYER}.qkv", [1, 0], first=64),
        modules=(f"{LAYER}.qkv", f"{ATTENTION}.k_proj"),
    ),
    Bug(
        "norms_swapped",
        "the norms' weights are swapped",
        convert=swap(f"{LAYER}.attention_scale", f"{LAYER}.mlp_scale"),
        modules=(LAYER, *NORMS),
    ),
    Bug(
        "halves_swapped",
        "the fused weight has up before gate",
        convert=halves_swapped,
        modules=(f"{LAYER}.gate_up", f"{MLP}.gate_proj", f"{MLP}.up_proj"),
    ),
)

PORTS = (
    Port(
        "attention",
        CODE / "attention.py",
        original,
        with_attention,
        lambda hf: hf.state_dict(),
        decode,
        decode,
        llama_norms,
        ATTENTION_BUGS,
    ),
    Port(
        "layer",
        CODE / "decoder_layer.py",
        original,
        with_layer,
        fused,
        decode,
        decode,
        llama_norms,
        LAYER_BUGS,
    ),
)
