"""GPT-NeoX, MPT and Falcon of curated-transformers against those of Hugging Face."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.alibi import norms as mpt_norms
from ports.entry import Logits
from ports.made import ported
from ports.shards import norms as neox_norms
from ports.steps import code_of, last_token, spans
from ports.weights import Model, State, hugging_face, norms_of, renamed

WIDTH, HEADS, LAYERS, VOCABULARY = 96, 6, 3, 512
GROUPS = 2  # of Falcon
BLOCK, LAST = "decoder.layers.*", "decoder.output_layer_norm"
NEOX, MPT, FALCON = "gpt_neox.layers.*", "transformer.blocks.*", "transformer.h.*"
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NEOX_SETTINGS = SIZES | {"intermediate_size": 4 * WIDTH, "rope_parameters": ROPE}
FALCON_SETTINGS = SIZES | {"num_kv_heads": GROUPS, "new_decoder_architecture": True, "bias": False}
MPT_SETTINGS = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS,
    "max_seq_len": 64,
}  # fmt: skip
scaled = partial(hugging_face, std=0.12)

# -- the ports -----------------------------------------------------------------------------------

COMMON = """layers/{cache,activations,embeddings,attention,feedforward,transformer}.py
    models/{config,output,module,transformer}.py"""
# base classes that load checkpoints
BEFORE = """from typing import Generic, TypeVar
class FromHF(Generic[TypeVar("ConfigT")]): ...
class Quantizable: ...
"""


def source(kind: str, *names: str) -> Path:
    own = (f"models/{kind}/{name}.py" for name in names)
    return packages.joined("curated_transformers", COMMON, *own, before=BEFORE)


def make_of(code: ModuleType, hf: Model, kind: str, given: dict[str, Any], **more: Any) -> Model:
    """Return a model of a kind. ``given``: what its configuration takes besides the sizes."""
    sizes = {"hidden_width": WIDTH, "n_hidden_layers": LAYERS, "n_pieces": VOCABULARY}
    settings = {**sizes, **given, **more}
    if "activation" in settings:
        settings["activation"] = code.Activation(settings["activation"])
    config = getattr(code, f"{kind}Config")(**settings)
    return getattr(code, f"{kind}CausalLM")(config)


GELU = {"activation": "gelu", "n_attention_heads": HEADS}
NEOX_GIVEN = GELU | {"intermediate_width": 4 * WIDTH, "rotary_embedding_fraction": 0.5}
MPT_GIVEN = GELU | {"intermediate_width_multiplier": 4}
FALCON_GIVEN = {
    "n_query_heads": HEADS, "n_key_value_heads": GROUPS, "rotary_embedding_base": 10000,
    "rotary_embedding_fraction": 1.0, "new_decoder_architecture": True, "use_alibi": False,
    "use_bias": False, "use_parallel_attention": True,
}  # fmt: skip
OUTSIDE = "decoder.{embeddings.piece_embeddings,output_layer_norm}"
INSIDE = (
    f"{BLOCK}.{{mha.input,mha.output,ffn.intermediate,ffn.output"
    ",attn_input_layer_norm,ffn_input_layer_norm}"
)


def convert_of(hf: Model, outside: str, inside: str) -> State:
    """Return the weights under the names of curated-transformers, theirs by `OUTSIDE`, `INSIDE`."""
    head = {} if hf.config.tie_word_embeddings else {"output_embeddings": "lm_head"}
    return renamed(hf.state_dict(), {OUTSIDE: outside, INSIDE: inside} | head)


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Give the tables of RoPE the dtype of the weights too."""
    model.to(dtype)


def work(model: Model, ids: torch.Tensor) -> Logits:
    """Prefill all but the last tokens, then feed them one by one with a mask of all so far."""
    logits, cache = [], None
    for first, last in spans(ids):
        mask = code_of(model).AttentionMask(torch.ones(1, last, dtype=torch.bool))
        out = model(ids[:, first:last], mask, cache=cache, store_cache=True)
        cache = out.cache
        logits.append(out.logits)
    return logits


# -- bugs ----------------------------------------------------------------------------------------


MHA, SCORER = f"{BLOCK}.mha", f"{BLOCK}.mha.attention_scorer"
ROTARY = f"{BLOCK}.mha.rotary_embeds"
INPUT, OUTPUT = f"{MHA}.input", f"{MHA}.output"
NEOX_ATTENTION = (MHA, SCORER, f"{NEOX}.attention")
NEOX_NORMS = (
    f"{BLOCK}.attn_input_layer_norm", f"{BLOCK}.ffn_input_layer_norm",
    f"{NEOX}.input_layernorm", f"{NEOX}.post_attention_layernorm",
)  # fmt: skip
NEOX_BUGS = r"""
not_by_head: q, k and v are fused one after the other, not head by head
    weights each(lambda w: turned(w, HEADS, 3), INPUT)
    in $INPUT $NEOX.attention.query_key_value
norms_swapped: the norms are swapped
    weights swap(f"{BLOCK}.attn_input_layer_norm", f"{BLOCK}.ffn_input_layer_norm")
    in $NEOX_NORMS
layer_off: a weight is that of the layer before
    weights copy("decoder.layers.2.ffn.output.weight", "decoder.layers.1.ffn.output.weight")
    in decoder.layers.2.ffn.output gpt_neox.layers.2.mlp.dense_4h_to_h
bias_left: the bias behind attention is not loaded
    weights each(torch.zeros_like, f"{OUTPUT}.bias")
    in $OUTPUT $NEOX.attention.dense
all_rotary: RoPE turns all of each head
    settings {"rotary_embedding_fraction": 1.0}
    in $ROTARY $ROTARY.rotary_embeds $NEOX.attention gpt_neox.rotary_emb
rope_base: the base of RoPE is another one
    settings {"rotary_embedding_base": 500}
    in $ROTARY.rotary_embeds gpt_neox.rotary_emb
silu: SiLU for GELU
    settings {"activation": "silu"}
    in $BLOCK.ffn.activation $NEOX.mlp.act
one_after_the_other: the feed-forward layer takes the output of attention too
    - ffn_in = input
    + ffn_in = input + attn_out
    in $BLOCK $NEOX
attention_lost: the output of attention is not added
    - self.parallel_attn_dropout(attn_out + ffn_out)
    + self.parallel_attn_dropout(ffn_out)
    in $BLOCK $NEOX
    golden $NEOX/Tensor.add
rotate_sign: RoPE turns the other way
    - input_1 = -input[..., half_idx:]
    -         input_2 = input[..., :half_idx]
    + input_1 = input[..., half_idx:]
    +         input_2 = -input[..., :half_idx]
    in $ROTARY.rotary_embeds $NEOX.attention
mask_off: the causal mask lets the next token through
    - torch.ones((key_len, key_len), device=query.device, dtype=torch.bool),
    + torch.ones((key_len, key_len), device=query.device, dtype=torch.bool),
    +         diagonal=1,
    in gpt_neox $NEOX_ATTENTION
position_off: positions are one behind while decoding
    -                 cache_len,
    -                 cache_len + seq_len,
    +                 cache_len - 1,
    +                 cache_len + seq_len - 1,
    in $ROTARY $NEOX.attention gpt_neox.rotary_emb
wrong_scale: scores are scaled with the number of keys
    - width = key.shape[-1]
    + width = key.shape[-2]
    in $NEOX_ATTENTION
    also attn_scores /= math.sqrt(width)
"""
MPT_ATTENTION = (MHA, SCORER, f"{MPT}.attn")
BIASES = f"{SCORER}.linear_biases"
MPT_BUGS = r"""
by_head: q, k and v are fused head by head
    weights each(lambda w: turned(w, 3, HEADS), INPUT)
    in $INPUT $MPT.attn.Wqkv
v_before_k: keys and values are fused in the wrong order
    weights each(lambda w: reordered(w, (0, 2, 1)), INPUT)
    in $INPUT $MPT.attn.Wqkv
transposed: the output projection of attention is transposed
    weights transpose(f"{OUTPUT}.weight")
    in $OUTPUT $MPT.attn.out_proj
last_norm_left: the last norm is not loaded
    weights each(torch.ones_like, "decoder.output_layer_norm.weight")
    in $LAST transformer.norm_f
layer_off: a weight is that of the layer before
    weights copy("decoder.layers.2.mha.input.weight", "decoder.layers.1.mha.input.weight")
    in decoder.layers.2.mha.input transformer.blocks.2.attn.Wqkv
wrong_eps: eps of the norms is too large
    settings {"layer_norm_eps": 0.01}
    in $BLOCK.*_input_layer_norm $LAST $MPT.norm_[12] transformer.norm_f
slopes: the slopes of the heads beyond a power of two are others
    - _slopes_with_step(2 * k, step=2)
    + _slopes_with_step(2 * k)
    in $BIASES $SCORER $MPT.attn transformer
    early
no_biases: tokens far away have no lower scores
    - attn_scores = self.linear_biases(attention_scores=attn_scores)
    + pass
    in $SCORER $MHA $MPT.attn
    golden $MPT.attn/Tensor.add
biases_turned: tokens far away have higher scores
    - distances = torch.arange(1 - seq_len, 1)
    + distances = torch.arange(0, -seq_len, -1)
    in $BIASES $MPT.attn transformer
biases_scaled: scores are scaled with their biases
    -             attn_scores /= math.sqrt(width)
    -
    -             if self.linear_biases is not None:
    -                 attn_scores = self.linear_biases(attention_scores=attn_scores)
    +             if self.linear_biases is not None:
    +                 attn_scores = self.linear_biases(attention_scores=attn_scores)
    +             attn_scores /= math.sqrt(width)
    in $MPT_ATTENTION
cache_order: new values are put before those of the cache
    - torch.cat([cache_v, value], dim=-2)
    + torch.cat([value, cache_v], dim=-2)
    in $MHA $MPT.attn
stale_input: the feed-forward layer takes the input of attention
    - ffn_in = residual
    + ffn_in = input
    in $BLOCK $MPT
    golden $MPT.norm_2*
    also ffn_out = self.ffn(self.ffn_input_layer_norm(ffn_in))
"""
FALCON_ATTENTION = f"{FALCON}.self_attention"
FALCON_BUGS = r"""
not_by_group: q, k and v are fused one after the other, not group by group
    weights each(lambda w: reordered(w, (0, 1, 2, 5, 6, 7, 3, 8, 4, 9)), INPUT)
    in $INPUT $FALCON_ATTENTION.query_key_value
v_groups: the value heads are in another order
    weights each(lambda w: reordered(w, (0, 1, 2, 3, 9, 5, 6, 7, 8, 4)), INPUT)
    in $INPUT $FALCON_ATTENTION.query_key_value
one_norm: both layers have the norm of attention
    weights copy(f"{BLOCK}.ffn_input_layer_norm", f"{BLOCK}.attn_input_layer_norm")
    in $BLOCK.ffn_input_layer_norm $FALCON.ln_mlp
transposed: the output projection of attention is transposed
    weights transpose(f"{OUTPUT}.weight")
    in $OUTPUT $FALCON_ATTENTION.dense
layer_off: a weight is that of the layer before
    weights copy(*(f"decoder.layers.{n}.ffn.intermediate.weight" for n in (2, 1)))
    in decoder.layers.2.ffn.intermediate transformer.h.2.mlp.dense_h_to_4h
head_tied: the head has the embedding's weight
    weights copy("output_embeddings", "decoder.embeddings.piece_embeddings")
    in output_embeddings lm_head
half_rotary: RoPE turns half of each head
    settings {"rotary_embedding_fraction": 0.5}
    in $ROTARY $ROTARY.rotary_embeds $FALCON_ATTENTION transformer.rotary_emb
heads_repeated: key heads are repeated in the wrong order
    - key = key.repeat_interleave(n_tiling, dim=1)
    + key = key.repeat(1, n_tiling, 1, 1)
    in $MHA $FALCON_ATTENTION
query_position: queries are turned as if each call began at position zero
    - query = self.rotary_embeds(query, positions=positions)
    + query = self.rotary_embeds(query)
    in $ROTARY $FALCON_ATTENTION
cache_slot: keys of the cache are one place too far
    - torch.cat([cache_k, key], dim=-2)
    + torch.cat([cache_k.roll(1, -2), key], dim=-2)
    in $MHA $FALCON_ATTENTION
wrong_scale: scores are scaled with the number of heads
    - attn_scores /= math.sqrt(width)
    + attn_scores /= math.sqrt(key.shape[1])
    in $MHA $SCORER $FALCON_ATTENTION
residual_normed: the normalised input is the residual
    -         residual = input
    -
    -         attn_out, cache = self.mha(
    +         residual = self.attn_input_layer_norm(input)
    +
    +         attn_out, cache = self.mha(
    in $BLOCK $FALCON
    also return self.ffn_residual_layer_norm(residual + output), cache
"""
PORTS = (
    ported(
        globals(),
        "curated-neox",
        "curated_transformers",
        text=NEOX_BUGS,
        source=partial(source, "gpt_neox", "config", "decoder", "causal_lm"),
        original=scaled("GPTNeoXForCausalLM", NEOX_SETTINGS),
        make=partial(make_of, kind="GPTNeoX", given=NEOX_GIVEN),
        convert=partial(
            convert_of,
            outside="gpt_neox.{embed_in,final_layer_norm}",
            inside=f"{NEOX}.{{attention.query_key_value,attention.dense,mlp.dense_h_to_4h"
            ",mlp.dense_4h_to_h,input_layernorm,post_attention_layernorm}",
        ),
        norms=neox_norms,
    ),
    ported(
        globals(),
        "curated-mpt",
        "curated_transformers",
        text=MPT_BUGS,
        source=partial(source, "mpt", "config", "decoder", "causal_lm"),
        original=scaled("MptForCausalLM", MPT_SETTINGS),
        make=partial(make_of, kind="MPT", given=MPT_GIVEN),
        convert=partial(
            convert_of,
            outside="transformer.{wte,norm_f}",
            inside=f"{MPT}.{{attn.Wqkv,attn.out_proj,ffn.up_proj,ffn.down_proj,norm_1,norm_2}}",
        ),
        norms=mpt_norms,
    ),
    ported(
        globals(),
        "curated-falcon",
        "curated_transformers",
        text=FALCON_BUGS,
        source=partial(source, "falcon", "config", "layer", "decoder", "causal_lm"),
        original=scaled("FalconForCausalLM", FALCON_SETTINGS),
        make=partial(make_of, kind="Falcon", given=FALCON_GIVEN),
        convert=partial(
            convert_of,
            outside="transformer.{word_embeddings,ln_f}",
            inside=f"{FALCON}.{{self_attention.query_key_value,self_attention.dense"
            ",mlp.dense_h_to_4h,mlp.dense_4h_to_h,ln_attn,ln_mlp}",
        ),
        golden_work=last_token,
        norms=norms_of(
            "transformer.h",
            {"ln_attn": "self_attention.query_key_value", "ln_mlp": "mlp.dense_h_to_4h"},
            {"transformer.ln_f": "lm_head"},
        ),
    ),
)
