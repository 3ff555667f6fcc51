"""GLM-4 as functions over a table of tensors, against Hugging Face's."""

from __future__ import annotations

from ports.made import SMALLER, written
from ports.weights import norms_of

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SETTINGS = SMALLER | {
    "num_attention_heads": 8, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": 2, "rope_parameters": ROPE,
}  # fmt: skip
NAMES = {
    "w.token_embd": "model.embed_tokens.weight",
    "w.output_norm": "model.norm.weight",
    "w.output": "lm_head.weight",
    "w.blk_*_{attn,post_attn,ffn,post_ffn}_norm": "model.layers.*"
    ".{input_layernorm,post_self_attn_layernorm,post_attention_layernorm,post_mlp_layernorm}.weight",
    "w.blk_*_attn_qkv": "model.layers.*.self_attn.{q,k,v}_proj.weight",
    "w.blk_*_attn_qkv_bias": "model.layers.*.self_attn.{q,k,v}_proj.bias",
    "w.blk_*_attn_output": "model.layers.*.self_attn.o_proj.weight",
    "w.blk_*_ffn_{up,down}": "model.layers.*.mlp.{gate_up,down}_proj.weight",
}
# those that stand before something; what the others give is summed
norms = norms_of(
    "model.layers",
    {"input_layernorm": "self_attn.{q,k,v}_proj", "post_attention_layernorm": "mlp.gate_up_proj"},
    {"model.norm": "lm_head"},
)
LAYER = "model.layers.*"  # the port is one module, so that the modules are golden's
ATTENTION = f"{LAYER}.self_attn"
BUGS = r"""
halves_turned: the two halves of the rotated channels are turned, not neighbours
    -     x0, x1 = x[..., :n_rot].float().unflatten(-1, (-1, 2)).unbind(-1)
    -     turned = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2)
    +     x0, x1 = x[..., :n_rot].float().chunk(2, dim=-1)
    +     turned = torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1)
    in $ATTENTION
frequencies_of_the_whole_head: the frequencies fall over the whole head, not over its rotated part
    - torch.arange(0, hp.n_rot, 2).float() / hp.n_rot)
    + torch.arange(0, hp.n_rot, 2).float() / hp.n_head_dim)
    in model.rotary_emb
    also angle = pos[:, None, None]
attention_not_normed: what attention gives is summed as it is, as in the model before
    - x = x + norm(a, w[f"blk_{n}_post_attn_norm"], hp.eps)
    + x = x + a
    in $LAYER.post_self_attn_layernorm $LAYER
    golden $LAYER.post_self_attn_layernorm $LAYER.post_self_attn_layernorm/*.*
norms_by_name: the converter confuses the norm after attention with the one before the MLP
    weights swap("w.blk_*_post_attn_norm", "w.blk_*_ffn_norm")
    in $LAYER.post_self_attn_layernorm $LAYER.post_attention_layernorm
heads_in_turns: query heads take the heads of keys and values in turns
    - return x.repeat_interleave(times, dim=0)
    + return x.repeat(times, 1, 1)
    in $ATTENTION
decoding_one_ahead: while decoding, positions are one too high
    - pos = torch.tensor([cache.n_past])
    + pos = torch.tensor([cache.n_past + 1])
    in model model.rotary_emb
    also angle = pos[:, None, None]
"""
PORTS = (written(globals(), "glm", "Glm", "Glm4ForCausalLM", length=18),)
