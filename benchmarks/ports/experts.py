"""Mixtral with the tokens of each expert side by side, and a cache that grows from nothing."""

from __future__ import annotations

from ports.made import SMALL, written
from ports.steps import last_token
from ports.weights import State

# with so few experts, half precision chooses the same ones as float32 for seeds 0 to 2
SETTINGS = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYER = "model.layers.*"
ATTENTION = ("layer.*.attention", f"{LAYER}.self_attn")
EXPERTS = ("layer.*.experts", f"{LAYER}.mlp.experts")
ROUTER = ("layer.*.experts", f"{LAYER}.mlp.gate")
NAMES = {
    "wte": "model.embed_tokens",
    "norm.scale": "model.norm.weight",
    "unembed": "lm_head",
    "layer.*.norm_{1,2}.scale": "model.layers.*.{input,post_attention}_layernorm.weight",
    "layer.*.attention.{query,project}": "model.layers.*.self_attn.{q_proj,o_proj}",
    "layer.*.attention.key_value": "model.layers.*.self_attn.{k,v}_proj",
    "layer.*.experts.router": "model.layers.*.mlp.gate",
    "layer.*.experts.{w13,w2}": "model.layers.*.mlp.experts.{gate_up,down}_proj",
}


def up_before_gate(state: State) -> None:
    """Give experts 1 and 3 of layer 1 their two halves in the other order."""
    w13 = state["layer.1.experts.w13"]
    w13[1::2] = w13[1::2].roll(SETTINGS["intermediate_size"], dims=1)


BUGS = r"""
shares_of_all: the shares of the chosen experts are not normalised to one
    - share = best.softmax(dim=-1).to(x.dtype)
    + share = self.router(flat).float().softmax(dim=-1).gather(-1, chosen).to(x.dtype)
    in $ROUTER
    golden $LAYER.mlp.gate/Tensor.*div*
shares_not_sorted: results in the order of the experts meet shares in the order of the tokens
    - share.flatten()[order].unsqueeze(-1)
    + share.flatten().unsqueeze(-1)
    in $EXPERTS
token_of_a_pair: the token of a pair is its number modulo the tokens
    - tokens = order // self.top
    + tokens = order % len(flat)
    in $EXPERTS
last_expert_wins: a token keeps the result of one expert, not the sum
    - torch.zeros_like(flat).index_add(0, tokens, results)
    + torch.zeros_like(flat).index_copy(0, tokens, results)
    in $EXPERTS
activation_on_up: the activation is applied to the second half
    - F.silu(gate) * up
    + gate * F.silu(up)
    in $EXPERTS $LAYER.mlp.experts.act_fn
least_likely: the second expert is the least likely one
    - best, chosen = self.router(flat).float().topk(self.top, dim=-1)
    + best, chosen = (t[:, [0, -1]] for t in self.router(flat).float().sort(-1, True))
    in $ROUTER
rope_interleaved: neighbouring channels turn together, not the halves
    - x.unflatten(-1, (2, -1)).unbind(-2)
    + x.unflatten(-1, (-1, 2)).unbind(-1)
    in $ATTENTION
    also turned = (real * cos
scaled_by_the_group: queries are scaled by the channels of a whole group
    - (q * self.channels**-0.5)
    + (q * (self.channels * self.shared) ** -0.5)
    in $ATTENTION
blind_to_itself: a token does not see itself
    - triu(known - tokens + 1)
    + triu(known - tokens)
    in $ATTENTION
    also scores = scores.masked_fill(
position_of_the_prompt: positions of decode steps count one too many
    - known + torch.arange(ids.shape[1])
    + known + (known > 0) + torch.arange(ids.shape[1])
    in (root) model model.rotary_emb
    also angle = positions.float()
cache_of_the_first_layer: all layers read the first layer's cache
    - layer(x, table, caches[n])
    + layer(x, table, caches[0])
    in (root) $ATTENTION
    also k = torch.cat((cache[0], k)
    also v = torch.cat((cache[1], v)
router_rows: the rows of layer 2's router are shifted by one expert
    weights each(lambda rows: rows.roll(-1, 0), "layer.2.experts.router.weight")
    in layer.2.experts.router model.layers.2.mlp.gate
down_of_the_next_expert: in layer 1 each expert has the down projection of the next one
    weights each(lambda w2: w2.roll(-1, 0), "layer.1.experts.w2")
    in layer.1.experts model.layers.1.mlp.experts
up_before_gate: two experts of layer 1 have up before gate
    weights up_before_gate
    in layer.1.experts model.layers.1.mlp.experts
query_heads_by_turns: layer 0 has its query heads in the order of other groups
    weights each(lambda w: turned(w, 2, 3), "layer.0.attention.query.weight")
    in layer.0.attention.query model.layers.0.self_attn.q_proj
outputs_swapped: layers 1 and 2 have each other's output projection
    weights swap("layer.1.attention.project", "layer.2.attention.project")
    in layer.[12].attention.project model.layers.[12].self_attn.o_proj
first_norm_twice: layer 2 has its first norm's weight in both norms
    weights copy("layer.2.norm_2", "layer.2.norm_1")
    in layer.2.norm_2 model.layers.2.post_attention_layernorm
"""
PORTS = (
    written(
        globals(),
        "experts",
        "SparseDecoder",
        "MixtralForCausalLM",
        golden_work=last_token,
        length=17,
    ),
)
