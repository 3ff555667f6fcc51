"""Mixtral with the tokens of each expert side by side, and a cache that grows from nothing."""

from __future__ import annotations

from typing import Any

import torch

from ports.entry import Bug, State
from ports.written import SMALL, each, swap, written

# with so few experts, half precision chooses the same ones as float32 for seeds 0 to 2
SETTINGS: dict[str, Any] = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
ATTENTION = ("layer.*.attention", "model.layers.*.self_attn")
EXPERTS = ("layer.*.experts", "model.layers.*.mlp.experts")
ROUTER = ("layer.*.experts", "model.layers.*.mlp.gate")
HEADS, KV_HEADS = SETTINGS["num_attention_heads"], SETTINGS["num_key_value_heads"]


def next_expert(weight: torch.Tensor) -> torch.Tensor:
    return weight.roll(-1, dims=0)


def up_before_gate(state: State) -> None:
    """Give experts 1 and 3 of layer 1 their two halves in the other order."""
    w13 = state["layer.1.experts.w13"]
    w13[1::2] = w13[1::2].roll(SETTINGS["intermediate_size"], dims=1)


def queries_by_turns(weight: torch.Tensor) -> torch.Tensor:
    """Order the query heads so that neighbours have different keys."""
    heads = weight.unflatten(0, (KV_HEADS, HEADS // KV_HEADS, -1))
    return heads.transpose(0, 1).flatten(0, 2)


def first_norms(state: State) -> None:
    state["layer.2.norm_2.scale"] = state["layer.2.norm_1.scale"].clone()


BUGS = (
    Bug(
        "shares_of_all",
        "the shares of the chosen experts are not normalised to one",
        old="share = best.softmax(dim=-1).to(x.dtype)",
        new="share = self.router(flat).float().softmax(dim=-1).gather(-1, chosen).to(x.dtype)",
        modules=ROUTER,
        golden=("model.layers.*.mlp.gate/Tensor.*div*",),
    ),
    Bug(
        "shares_not_sorted",
        "results in the order of the experts meet shares in the order of the tokens",
        old="share.flatten()[order].unsqueeze(-1)",
        new="share.flatten().unsqueeze(-1)",
        modules=EXPERTS,
    ),
    Bug(
        "token_of_a_pair",
        "the token of a pair is its number modulo the tokens",
        old="tokens = order // self.top",
        new="tokens = order % len(flat)",
        modules=EXPERTS,
    ),
    Bug(
        "last_expert_wins",
        "a token keeps the result of one expert, not the sum",
        old="torch.zeros_like(flat).index_add(0, tokens, results)",
        new="torch.zeros_like(flat).index_copy(0, tokens, results)",
        modules=EXPERTS,
    ),
    Bug(
        "activation_on_up",
        "the activation is applied to the second half",
        old="F.silu(gate) * up",
        new="gate * F.silu(up)",
        modules=(*EXPERTS, "model.layers.*.mlp.experts.act_fn"),
    ),
    Bug(
        "least_likely",
        "the second expert is the least likely one",
        old="best, chosen = self.router(flat).float().topk(self.top, dim=-1)",
        new="best, chosen = (t[:, [0, -1]] for t in self.router(flat).float().sort(-1, True))",
        modules=ROUTER,
    ),
    Bug(
        "rope_interleaved",
        "neighbouring channels turn together, not the halves",
        old="x.unflatten(-1, (2, -1)).unbind(-2)",
        new="x.unflatten(-1, (-1, 2)).unbind(-1)",
        modules=ATTENTION,
        also=("turned = (real * cos",),
    ),
    Bug(
        "scaled_by_the_group",
        "queries are scaled by the channels of a whole group",
        old="(q * self.channels**-0.5)",
        new="(q * (self.channels * self.shared) ** -0.5)",
        modules=ATTENTION,
    ),
    Bug(
        "blind_to_itself",
        "a token does not see itself",
        old="triu(known - tokens + 1)",
        new="triu(known - tokens)",
        modules=ATTENTION,
        also=("scores = scores.masked_fill(",),
    ),
    Bug(
        "position_of_the_prompt",
        "positions of decode steps count one too many",
        old="known + torch.arange(ids.shape[1])",
        new="known + (known > 0) + torch.arange(ids.shape[1])",
        modules=("", "model", "model.rotary_emb"),
        also=("angle = positions.float()",),
    ),
    Bug(
        "cache_of_the_first_layer",
        "all layers read the first layer's cache",
        old="layer(x, table, caches[n])",
        new="layer(x, table, caches[0])",
        modules=("", *ATTENTION),
        also=("k = torch.cat((cache[0], k)", "v = torch.cat((cache[1], v)"),
    ),
    Bug(
        "router_rows",
        "the rows of layer 2's router are shifted by one expert",
        convert=each(next_expert, "layer.2.experts.router.weight"),
        modules=("layer.2.experts.router", "model.layers.2.mlp.gate"),
    ),
    Bug(
        "down_of_the_next_expert",
        "in layer 1 each expert has the down projection of the next one",
        convert=each(next_expert, "layer.1.experts.w2"),
        modules=("layer.1.experts", "model.layers.1.mlp.experts"),
    ),
    Bug(
        "up_before_gate",
        "two experts of layer 1 have up before gate",
        convert=up_before_gate,
        modules=("layer.1.experts", "model.layers.1.mlp.experts"),
    ),
    Bug(
        "query_heads_by_turns",
        "layer 0 has its query heads in the order of other groups",
        convert=each(queries_by_turns, "layer.0.attention.query.weight"),
        modules=("layer.0.attention.query", "model.layers.0.self_attn.q_proj"),
    ),
    Bug(
        "outputs_swapped",
        "layers 1 and 2 have each other's output projection",
        convert=swap("layer.1.attention.project.weight", "layer.2.attention.project.weight"),
        modules=("layer.[12].attention.project", "model.layers.[12].self_attn.o_proj"),
    ),
    Bug(
        "first_norm_twice",
        "layer 2 has its first norm's weight in both norms",
        convert=first_norms,
        modules=("layer.2.norm_2", "model.layers.2.post_attention_layernorm"),
    ),
)
PORTS = (written("experts", "SparseDecoder", "Mixtral", SETTINGS, BUGS, keep=1, length=17),)
