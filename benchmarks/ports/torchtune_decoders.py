"""torchtune's Llama 3, Qwen 2 and Gemma 2 against those of Hugging Face."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.gemma import norms as gemma_norms
from ports.made import SMALLER, ported
from ports.steps import last_token, spans, whole
from ports.weights import LLAMA, Model, State, each, hugging_face, interleaved, norms_of, renamed

WIDTH, HEADS, GROUPS, VOCABULARY, LAYERS, PLACES = 64, 4, 2, 512, 3, 32
BLOCK, LAYER = "layers.*", "model.layers.*"
SETTINGS = SMALLER | {"intermediate_size": 160, "attn_implementation": "sdpa"}
LLAMA_SETTINGS = SETTINGS | {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
QWEN_SETTINGS = SETTINGS | {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
GEMMA_SETTINGS = SETTINGS | {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 6,
    "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0, "attn_implementation": "eager",
}  # fmt: skip

# -- the ports -----------------------------------------------------------------------------------

COMMON = """modules/{kv_cache,rms_norm,tied_linear,feed_forward,position_embeddings}.py
    modules/{attention_utils,attention,transformer}.py"""
# what attention takes from modules that look at the machine
STUBS: dict[str, dict[str, Any]] = {
    "utils___import_guard": {"_SUPPORTS_FLEX_ATTENTION": False},
    "utils___logging": {"get_logger": logging.getLogger, "log_once": None},
}


def source_of(names: str) -> Path:
    """Return all files in one. ``names``: those of the model."""
    packages.file("torchtune", "", **STUBS)
    own = (f"models/{name}.py" for name in names.split())
    return packages.joined("torchtune", COMMON, *own, without="lora_")


def sizes(hf: Model, **settings: Any) -> dict[str, Any]:
    """Return what all builders take."""
    config = hf.config
    given = {
        "vocab_size": VOCABULARY, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": GROUPS,
        "embed_dim": WIDTH, "intermediate_dim": config.intermediate_size, "max_seq_len": PLACES,
        "norm_eps": config.rms_norm_eps, "rope_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    return {**given, **settings}


def make_gemma(code: ModuleType, hf: Model, cap_hidden: bool = False, **settings: Any) -> Model:
    """Return torchtune's Gemma 2, its logits capped. ``cap_hidden``: what they are made from is.

    torchtune's own builder caps the output of the last norm, which is wrong.
    """
    config = hf.config
    given = {
        "head_dim": config.head_dim,
        "hidden_capping_value": config.attn_logit_softcapping,
        "final_capping_value": config.final_logit_softcapping,
        "sliding_window_size": config.sliding_window,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
    }
    model = code.gemma2(**sizes(hf, **{**given, **settings}))
    last, tied = model.norm, model.output
    model.norm, model.logit_capping = last.rms_norm, last.logit_capping
    if cap_hidden:
        model.output = lambda hidden: tied(model.logit_capping(hidden))
    else:
        model.output = lambda hidden: model.logit_capping(tied(hidden))
    return model


NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm.scale": "model.norm.weight",
    "layers.*.attn.{q,k,v,output}_proj": "model.layers.*.self_attn.{q,k,v,o}_proj",
    "layers.*.mlp.{w1,w2,w3}": "model.layers.*.mlp.{gate,down,up}_proj",
}
TWO_NORMS = {"layers.*.{sa,mlp}_norm.scale": f"{LAYER}.{{input,post_attention}}_layernorm.weight"}
FOUR_NORMS = {
    "layers.*.{sa_norm,sa_scale,mlp_norm,mlp_scale}.scale": "model.layers.*"
    ".{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight"
}


def convert_of(hf: Model, norms: dict[str, str], permuted: bool = True) -> State:
    """Return the weights under torchtune's names. ``permuted``: RoPE is interleaved."""
    head = {} if hf.config.tie_word_embeddings else {"output": "lm_head"}
    state = renamed(hf.state_dict(), NAMES | norms | head)
    if permuted:
        permute(state)
    return state


def permute(
    state: State,
    kind: str = "{weight,bias}",
    order: Callable[[torch.Tensor, int], torch.Tensor] = interleaved,
) -> None:
    """Put the rows of each head of q and k in the order that interleaved RoPE wants."""
    for part, heads in (("q", HEADS), ("k", GROUPS)):
        each(partial(order, heads=heads), f"{BLOCK}.attn.{part}_proj.{kind}")(state)


def set_up(model: Model, dtype: torch.dtype) -> None:
    model.setup_caches(batch_size=1, dtype=dtype, decoder_max_seq_len=PLACES)


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one, as torchtune's generation."""
    model.reset_caches()
    mask = torch.tril(torch.ones(PLACES, PLACES, dtype=torch.bool))[None]
    return [
        model(
            ids[:, first:last], mask=mask[:, first:last], input_pos=torch.arange(first, last)[None]
        )
        for first, last in spans(ids)
    ]


# -- bugs ----------------------------------------------------------------------------------------

ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
QK = (f"{BLOCK}.attn.[qk]_proj", f"{LAYER}.self_attn.[qk]_proj")
ROPE = (f"{BLOCK}.attn.pos_embeddings", "model.rotary_emb")
ACTIVATION = (f"{BLOCK}.mlp.activation", f"{LAYER}.mlp.act_fn")
NORMS = (
    f"{BLOCK}.sa_norm", f"{BLOCK}.mlp_norm", "norm",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
GEMMA_NORMS = (f"{BLOCK}.*_norm", f"{BLOCK}.*_scale", "norm", f"{LAYER}.*layernorm", "model.norm")
GATE_UP = (f"{BLOCK}.mlp.w[13]", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj")
LLAMA_BUGS = r"""
rope_layout: q and k keep the order of RoPE by halves
    weights lambda state: permute(state, "weight", by_halves)
    in $QK
norms_swapped: the two norms of each layer are swapped
    weights swap("layers.*.sa_norm", "layers.*.mlp_norm")
    in $NORMS
gate_up: gate and up are swapped
    weights swap("layers.*.mlp.w1", "layers.*.mlp.w3")
    in $GATE_UP
layer_off: a value projection is that of the layer before
    weights copy("layers.2.attn.v_proj", "layers.1.attn.v_proj")
    in layers.2.attn.v_proj model.layers.2.self_attn.v_proj
head_tied: the head has the embedding's weight
    weights copy("output", "tok_embeddings")
    in output lm_head
wrong_eps: eps of the norms is 100 times too large
    settings {"norm_eps": 0.001}
    in $NORMS
rope_base: the base of RoPE is 10,000
    settings {"rope_base": 10000}
    in $ROPE
rotate_sign: the second half of each pair is turned the other way
    - + xshaped[..., 0] * rope_cache[..., 1],
    -             ],
    -             -1,
    -         )
    -
    -         # tensor has shape [b, s, n_h, h_d]
    + - xshaped[..., 0] * rope_cache[..., 1],
    +             ],
    +             -1,
    +         )
    +
    +         # tensor has shape [b, s, n_h, h_d]
    in $BLOCK.attn.pos_embeddings $LAYER.self_attn
cache_slot: keys are stored one place too far
    - k_out[:, :, self.cache_pos[:seq_len]] = k_val
    + k_out[:, :, self.cache_pos[:seq_len] + 1] = k_val
    in $ATTENTION
keys_from_zero: keys are turned as if each call began at position zero
    - k = self.pos_embeddings(k, input_pos=input_pos)
    + k = self.pos_embeddings(k)
    in $ATTENTION
heads_repeated: value heads are repeated in the wrong order
    - v = v.unsqueeze(2).expand(expand_shape).flatten(1, 2)
    + v = v.repeat(1, q_per_kv, 1, 1)
    in $ATTENTION
normed_residual: the normalised input is added after attention
    - h = self.sa_scale(attn_out) + x
    + h = self.sa_scale(attn_out) + h
    in $BLOCK $LAYER
"""
QWEN_BUGS = r"""
rope_layout: q and k are ordered for interleaved RoPE
    weights permute
    in $QK
bias_layout: the biases of q and k are ordered for interleaved RoPE
    weights lambda state: permute(state, "bias")
    in $QK
bias_left: the bias of the values is not loaded
    weights each(torch.zeros_like, "layers.*.attn.v_proj.bias")
    in $BLOCK.attn.v_proj $LAYER.self_attn.v_proj
layer_off: a down projection is that of the layer before
    weights copy("layers.2.mlp.w2", "layers.1.mlp.w2")
    in layers.2.mlp.w2 model.layers.2.mlp.down_proj
transposed: the output projection of attention is transposed
    weights transpose("layers.*.attn.output_proj.weight")
    in $BLOCK.attn.output_proj $LAYER.self_attn.o_proj
rope_base: the base of RoPE is 10,000
    settings {"rope_base": 10000.0}
    in $ROPE
rotate_sign: RoPE turns the other way
    - rotated = torch.cat((-x2, x1), dim=-1)
    + rotated = torch.cat((x2, -x1), dim=-1)
    in $BLOCK.attn.pos_embeddings $LAYER.self_attn
query_position: queries are turned as if they were one position later
    - q = self.pos_embeddings(q, input_pos=input_pos)
    + q = self.pos_embeddings(q, input_pos=input_pos + 1)
    in $ATTENTION
cache_advance: the cache moves on by one place after a prompt of many
    - self.cache_pos.add_(seq_len)
    + self.cache_pos.add_(1)
    in $ATTENTION
    also k_out[:, :, self.cache_pos[:seq_len]]
    also v_out[:, :, self.cache_pos[:seq_len]]
norm_mean: the norms subtract the mean
    - return F.rms_norm(
    + return F.layer_norm(
    in $NORMS
gelu: GELU for SiLU
    - activation: nn.Module = nn.SiLU()
    + activation: nn.Module = nn.GELU()
    in $ACTIVATION
    early
"""
GEMMA_BUGS = r"""
norms_swapped: the norms before and after the feed-forward layer are swapped
    weights swap("layers.*.mlp_norm", "layers.*.mlp_scale")
    in $BLOCK.mlp_norm $BLOCK.mlp_scale $LAYER.pre_feedforward_layernorm
    in $LAYER.post_feedforward_layernorm
hidden_capped: the output of the last norm is capped, the logits are not
    settings {"cap_hidden": True}
    in (root) logit_capping
    golden /Tensor.div /Torch.tanh /Tensor.mul
scores_not_capped: the soft cap of the scores is left out
    settings {"hidden_capping_value": None}
    in $ATTENTION
    golden $LAYER.self_attn/Tensor.div $LAYER.self_attn/Torch.tanh
    golden $LAYER.self_attn/Tensor.mul@eager_attention_forward
wrong_cap: the scores are capped at another value
    settings {"hidden_capping_value": 6.0}
    in $ATTENTION
wrong_scale: scores are scaled with the width of a head
    settings {"query_pre_attn_scalar": None}
    in $ATTENTION
window_one_wider: the sliding window holds one token more
    - -1 * self.sliding_window_size + 1
    + -1 * self.sliding_window_size
    in model $ATTENTION
local_and_global_swapped: layers with a sliding window see all, the others a window
    - (layer_idx % 2)==0
    + (layer_idx % 2)==1
    in model $ATTENTION $LAYER
    early
one_stored: norm weights are stored with the one
    weights each(lambda w: w + 1, "norm.scale layers.*.{sa,mlp}_{norm,scale}.scale")
    in $GEMMA_NORMS
embedding_scale: the embeddings are not scaled
    - return x * torch.tensor(self.embedding_dim**0.5, dtype=x.dtype)
    + return x
    in tok_embeddings model.embed_tokens
    golden model.embed_tokens/Tensor.mul
no_post_norm: the output of the feed-forward layer is not normalised
    - out = h + self.mlp_scale(mlp_out)
    -         return out
    -
    -
    - class TransformerCross
    + out = h + mlp_out
    +         return out
    +
    +
    + class TransformerCross
    in $BLOCK $LAYER
    golden $LAYER.post_feedforward_layernorm*
k_heads: the key heads are in another order
    weights each(lambda w: reordered(w, (1, 0)), "layers.*.attn.k_proj.weight")
    in $BLOCK.attn.k_proj $LAYER.self_attn.k_proj
"""
port = partial(ported, globals())
PORTS = (
    port(
        "torchtune-llama3",
        "torchtune",
        text=LLAMA_BUGS,
        source=partial(source_of, "llama3/_component_builders"),
        original=hugging_face("LlamaForCausalLM", LLAMA_SETTINGS),
        make=lambda code, hf, **more: code.llama3(**sizes(hf, **more)),
        convert=partial(convert_of, norms=TWO_NORMS),
        prepare=set_up,
    ),
    port(
        "torchtune-qwen2",
        "torchtune",
        text=QWEN_BUGS,
        source=partial(source_of, "qwen2/{_positional_embeddings,_component_builders}"),
        original=hugging_face("Qwen2ForCausalLM", QWEN_SETTINGS),
        make=lambda code, hf, **more: code.qwen2(**sizes(hf, **more), tie_word_embeddings=True),
        convert=partial(convert_of, norms=TWO_NORMS, permuted=False),
        golden_work=last_token,  # as generate does
        # what takes the last one's output is the embedding too
        norms=norms_of("model.layers", LLAMA),
        prepare=set_up,
    ),
    port(
        "torchtune-gemma2",
        "torchtune",
        text=GEMMA_BUGS,
        source=partial(
            source_of,
            "gemma/{rms_norm,gemma_norm_embedding,_component_builders}"
            " gemma2/{_attention,_component_builders}",
        ),
        original=hugging_face("Gemma2ForCausalLM", GEMMA_SETTINGS),
        make=make_gemma,
        convert=partial(convert_of, norms=FOUR_NORMS),
        golden_work=whole,
        # all tokens at once: torchtune's sliding window counts from the start of each call
        work=lambda model, ids: [model(ids)],
        norms=gemma_norms,
        length=20,
        offset=1.0,
    ),
)
