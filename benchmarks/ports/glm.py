"""GLM-4 as functions over a table of tensors, against Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ports.entry import Bug, Model, State
from ports.written import swap, written

SETTINGS: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "initializer_range": 0.12,
    "attn_implementation": "eager",
}


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms that stand before something; what the others give is summed."""
    for layer in hf.model.layers:
        a = layer.self_attn
        yield layer.input_layernorm, [a.q_proj, a.k_proj, a.v_proj]
        yield layer.post_attention_layernorm, [layer.mlp.gate_up_proj]
    yield hf.model.norm, [hf.lm_head]


def norms_by_name(state: State) -> None:
    """Take the norm after attention for that before the MLP, as its name suggests."""
    for n in range(SETTINGS["num_hidden_layers"]):
        swap(f"w.blk_{n}_post_attn_norm", f"w.blk_{n}_ffn_norm")(state)


# the port is one module, so that the modules are golden's
LAYER = "model.layers.*"
ATTENTION = (f"{LAYER}.self_attn",)
BUGS = (
    Bug(
        "halves_turned",
        "the two halves of the rotated channels are turned, not neighbours",
        old="""\
    x0, x1 = x[..., :n_rot].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1).flatten(-2)
""",
        new="""\
    x0, x1 = x[..., :n_rot].float().chunk(2, dim=-1)
    turned = torch.cat((x0 * cos - x1 * sin, x0 * sin + x1 * cos), dim=-1)
""",
        modules=ATTENTION,
    ),
    Bug(
        "frequencies_of_the_whole_head",
        "the frequencies fall over the whole head, not over its rotated part",
        old="torch.arange(0, hp.n_rot, 2).float() / hp.n_rot)",
        new="torch.arange(0, hp.n_rot, 2).float() / hp.n_head_dim)",
        modules=("model.rotary_emb",),
        also=("angle = pos[:, None, None]",),
    ),
    Bug(
        "attention_not_normed",
        "what attention gives is summed as it is, as in the model before",
        old='x = x + norm(a, w[f"blk_{n}_post_attn_norm"], hp.eps)',
        new="x = x + a",
        modules=(f"{LAYER}.post_self_attn_layernorm", LAYER),
        golden=(
            f"{LAYER}.post_self_attn_layernorm",
            f"{LAYER}.post_self_attn_layernorm/*.*",
        ),
    ),
    Bug(
        "norms_by_name",
        "the converter confuses the norm after attention with the one before the MLP",
        convert=norms_by_name,
        modules=(f"{LAYER}.post_self_attn_layernorm", f"{LAYER}.post_attention_layernorm"),
    ),
    Bug(
        "heads_in_turns",
        "query heads take the heads of keys and values in turns",
        old="return x.repeat_interleave(times, dim=0)",
        new="return x.repeat(times, 1, 1)",
        modules=ATTENTION,
    ),
    Bug(
        "decoding_one_ahead",
        "while decoding, positions are one too high",
        old="pos = torch.tensor([cache.n_past])",
        new="pos = torch.tensor([cache.n_past + 1])",
        modules=("model", "model.rotary_emb"),
        also=("angle = pos[:, None, None]",),
    ),
)
PORTS = (written("glm", "Glm", "Glm4", SETTINGS, BUGS, norms=norms, length=18),)
