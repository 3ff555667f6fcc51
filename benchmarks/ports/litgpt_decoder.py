"""LitGPT's Llama and Mixtral against those of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, decode, llama_norms, spread

WIDTH, HEADS, GROUPS, EXPERTS, VOCABULARY, LAYERS = 64, 4, 2, 4, 512, 3
HEAD = WIDTH // HEADS
SIZES = [WIDTH, GROUPS * HEAD, GROUPS * HEAD]  # rows of q, k and v in the fused weight
BLOCK, LAYER = "transformer.h.*", "model.layers.*"
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "initializer_range": 0.12,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def llama(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**LLAMA, intermediate_size=160, attn_implementation="sdpa")
    return spread(transformers.LlamaForCausalLM(config), seed)


def mixtral(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        **LLAMA,
        intermediate_size=96,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )
    return spread(transformers.MixtralForCausalLM(config), seed)


# -- the port ------------------------------------------------------------------------------------


def source() -> Path:
    stub = {"qkv_reassemble": None}  # for old checkpoints; its module wants lightning
    return packages.file("litgpt", "model.py", scripts__convert_hf_checkpoint=stub)


def make(code: ModuleType, hf: Model, length: int = 73, **settings: float) -> Model:
    """Return LitGPT's model with its key-value cache."""
    from litgpt.config import Config

    # the configuration looks classes up there
    sys.modules["litgpt.model"] = sys.modules["litgpt"].model = code  # type: ignore[attr-defined]
    experts = getattr(hf.config, "num_local_experts", 0)
    given = {
        "name": "port",
        "block_size": 128,
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_query_groups": GROUPS,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": VOCABULARY,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": hf.config.rms_norm_eps,
        "mlp_class_name": "LLaMAMoE" if experts else "LLaMAMLP",
        "intermediate_size": hf.config.intermediate_size,
        "moe_intermediate_size": hf.config.intermediate_size if experts else None,
        "n_expert": experts,
        "n_expert_per_token": 2 if experts else 0,
        "rope_base": hf.config.rope_parameters["rope_theta"],
    }
    model = code.GPT(Config(**{**given, **settings}))
    model.set_kv_cache(batch_size=1, max_seq_length=length)
    return model


def convert(hf: Model) -> State:
    """Return the weights under LitGPT's names, q, k and v in one."""
    given, state = hf.state_dict(), {}
    state["transformer.wte.weight"] = given["model.embed_tokens.weight"]
    state["transformer.ln_f.weight"] = given["model.norm.weight"]
    state["lm_head.weight"] = given["lm_head.weight"]
    for n in range(LAYERS):
        old, new = f"model.layers.{n}", f"transformer.h.{n}"
        parts = [given[f"{old}.self_attn.{name}_proj.weight"] for name in "qkv"]
        state[f"{new}.attn.qkv.weight"] = torch.cat(parts)
        state[f"{new}.attn.proj.weight"] = given[f"{old}.self_attn.o_proj.weight"]
        state[f"{new}.norm_1.weight"] = given[f"{old}.input_layernorm.weight"]
        state[f"{new}.norm_2.weight"] = given[f"{old}.post_attention_layernorm.weight"]
        if f"{old}.mlp.gate.weight" not in given:
            for theirs, ours in (("gate", "fc_1"), ("up", "fc_2"), ("down", "proj")):
                state[f"{new}.mlp.{ours}.weight"] = given[f"{old}.mlp.{theirs}_proj.weight"]
            continue
        state[f"{new}.mlp.gate.weight"] = given[f"{old}.mlp.gate.weight"]
        for e in range(EXPERTS):
            expert = f"{new}.mlp.experts.{e}"
            gate, up = given[f"{old}.mlp.experts.gate_up_proj"][e].chunk(2)
            state[f"{expert}.fc_1.weight"], state[f"{expert}.fc_2.weight"] = gate, up
            state[f"{expert}.proj.weight"] = given[f"{old}.mlp.experts.down_proj"][e]
    return state


def work(model: Model, ids: torch.Tensor, whole_cache: bool = True) -> Logits:
    """Prefill all but the last tokens, then feed them one by one.

    ``whole_cache``: attention goes over the empty places of the cache too, which are masked.
    """
    logits, prompt = [], ids.shape[1] - DECODE
    for first, last in [(0, prompt), *((n, n + 1) for n in range(prompt, ids.shape[1]))]:
        end = None if whole_cache else last
        logits.append(model(ids[:, first:last], torch.arange(first, last), end))
    return logits


# -- changes of weights --------------------------------------------------------------------------


def each(
    change: Callable[[State, str], None], layers: range = range(LAYERS)
) -> Callable[..., None]:
    """Return what changes the weights of each layer. ``change(state, path of the layer)``."""

    def apply(state: State) -> None:
        for n in layers:
            change(state, f"transformer.h.{n}")

    return apply


def swap(a: str, b: str) -> Callable[[State, str], None]:
    def change(state: State, path: str) -> None:
        first, second = f"{path}.{a}.weight", f"{path}.{b}.weight"
        state[first], state[second] = state[second], state[first]

    return change


def rows(order: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State, str], None]:
    """Return what puts the rows of the fused q, k and v in another order."""

    def change(state: State, path: str) -> None:
        name = f"{path}.attn.qkv.weight"
        state[name] = state[name][order(torch.arange(sum(SIZES)))]

    return change


def interleaved(n: torch.Tensor) -> torch.Tensor:
    """Take the rows of each head of q and k as interleaved RoPE wants them."""
    q, k, v = n.split(SIZES)
    return torch.cat([p.view(-1, 2, HEAD // 2).transpose(1, 2).flatten() for p in (q, k)] + [v])


def k_heads(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.split(SIZES)
    return torch.cat([q, k.view(GROUPS, HEAD).flip(0).flatten(), v])


def v_before_k(n: torch.Tensor) -> torch.Tensor:
    q, k, v = n.split(SIZES)
    return torch.cat([q, v, k])


def by_group(n: torch.Tensor) -> torch.Tensor:
    """Take q, k and v of one group after the other, as old checkpoints have them."""
    q, k, v = (part.view(GROUPS, -1) for part in n.split(SIZES))
    return torch.cat([q, k, v], dim=1).flatten()


def transposed(state: State, path: str) -> None:
    name = f"{path}.attn.proj.weight"
    state[name] = state[name].T.contiguous()


def unit_offset(state: State, path: str) -> None:
    for name in ("norm_1", "norm_2"):
        state[f"{path}.{name}.weight"] -= 1


def last_norm_left(state: State) -> None:
    state["transformer.ln_f.weight"].fill_(1)


def head_tied(state: State) -> None:
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()


def layer_before(name: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[f"transformer.h.2.{name}.weight"] = state[f"transformer.h.1.{name}.weight"].clone()

    return change


def experts_swapped(state: State, path: str) -> None:
    for part in ("fc_1", "fc_2", "proj"):
        swap(f"mlp.experts.0.{part}", f"mlp.experts.1.{part}")(state, path)


def router_rolled(state: State, path: str) -> None:
    name = f"{path}.mlp.gate.weight"
    state[name] = state[name].roll(1, 0)


def gates_swapped(state: State, path: str) -> None:
    for e in range(EXPERTS):
        swap(f"mlp.experts.{e}.fc_1", f"mlp.experts.{e}.fc_2")(state, path)


# -- bugs ----------------------------------------------------------------------------------------

QKV = (f"{BLOCK}.attn.qkv",)
QK = (*QKV, f"{LAYER}.self_attn.[qk]_proj")
ATTENTION = (f"{BLOCK}.attn", f"{LAYER}.self_attn")
NORMS = (
    f"{BLOCK}.norm_[12]", "transformer.ln_f",
    f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm", "model.norm",
)  # fmt: skip
ROTARY = ("", "model.rotary_emb")
ATTEND = "attention_scores_scalar or self.config.n_embd) ... F.scaled_dot_product_attention("
# the text after k's repetition, which tells it from that of latent attention
HEADS_REPEATED = """(q_per_kv, dim=1)  # (B, nh_q, T, hs)
            v = v.repeat_interleave(q_per_kv, dim=1)  # (B, nh_q, T, hs)

        if self.apply"""
ROUTER = """            probs, indices = torch.topk(router, self.config.n_expert_per_token)\
  # (B*T, n_expert_per_token)
            probs = probs.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
"""
ROUTER_FIRST = """            router = router.softmax(dim=1, dtype=torch.float).to(dtype=x.dtype)
            probs, indices = torch.topk(router, self.config.n_expert_per_token)
"""
BOTH = (
    Bug(
        "rope_layout",
        "q and k are ordered for interleaved RoPE",
        convert=each(rows(interleaved)),
        modules=QK,
    ),
    Bug(
        "k_heads",
        "the key heads are in another order",
        convert=each(rows(k_heads), range(1, 2)),
        modules=(*QKV, f"{LAYER}.self_attn.k_proj"),
    ),
    Bug(
        "norms_swapped",
        "the two norms of each layer are swapped",
        convert=each(swap("norm_1", "norm_2")),
        modules=NORMS,
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is 100 times too large",
        settings={"norm_eps": 1e-3},
        modules=NORMS,
    ),
    Bug("rope_base", "the base of RoPE is 100,000", settings={"rope_base": 100000}, modules=ROTARY),
    Bug(
        "k_rope_off",
        "keys are turned with cos and sin swapped",
        "k_roped = apply_rope(k[..., :rope_n_elem], cos, sin)",
        "k_roped = apply_rope(k[..., :rope_n_elem], sin, cos)",
        modules=ATTENTION,
    ),
    Bug(
        "no_residual",
        "the residual is not added after attention",
        "        else:\n            x = attention_output + x\n            x_normed",
        "        else:\n            x = attention_output\n            x_normed",
        modules=(BLOCK, LAYER),
        golden=(f"{LAYER}/Tensor.add",),
    ),
)

LLAMA_BUGS = (
    *BOTH,
    Bug(
        "qkv_order",
        "keys and values are fused in the wrong order",
        convert=each(rows(v_before_k)),
        modules=(*QKV, f"{LAYER}.self_attn.[kv]_proj"),
    ),
    Bug(
        "qkv_groups",
        "q, k and v are fused group by group",
        convert=each(rows(by_group)),
        modules=(*QKV, f"{LAYER}.self_attn.[qkv]_proj"),
    ),
    Bug(
        "gate_up",
        "gate and up are swapped",
        convert=each(swap("mlp.fc_1", "mlp.fc_2")),
        modules=(f"{BLOCK}.mlp.fc_[12]", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    ),
    Bug(
        "transposed",
        "the output projection of attention is transposed",
        convert=each(transposed),
        modules=(f"{BLOCK}.attn.proj", f"{LAYER}.self_attn.o_proj"),
    ),
    Bug(
        "layer_off",
        "a down projection is that of the layer before",
        convert=layer_before("mlp.proj"),
        modules=("transformer.h.2.mlp.proj", "model.layers.2.mlp.down_proj"),
    ),
    Bug(
        "unit_offset",
        "norm weights are stored without the one",
        convert=each(unit_offset),
        modules=NORMS,
    ),
    Bug(
        "last_norm",
        "the weight of the last norm is not loaded",
        convert=last_norm_left,
        modules=("transformer.ln_f", "model.norm"),
    ),
    Bug(
        "head_tied", "the head has the embedding's weight", convert=head_tied, modules=("lm_head",)
    ),
    Bug(
        "rotate_sign",
        "RoPE turns the other way",
        "rotated = torch.cat((-x2, x1), dim=-1)  # (B, ..., T, head_size)",
        "rotated = torch.cat((x2, -x1), dim=-1)  # (B, ..., T, head_size)",
        modules=ATTENTION,
    ),
    Bug(
        "heads_repeated",
        "key heads are repeated in the wrong order",
        f"k = k.repeat_interleave{HEADS_REPEATED}",
        f"k = k.repeat(1, q_per_kv, 1, 1){HEADS_REPEATED.partition(')')[2]}",
        modules=ATTENTION,
    ),
    Bug(
        "mask_off",
        "the causal mask lets the next token through",
        "torch.tril(ones)",
        "torch.tril(ones, 1)",
        modules=("", "model", *ATTENTION),
        early=True,
    ),
    Bug(
        "no_scale",
        "scores are scaled with the width of the model",
        "attention_scores_scalar or self.config.head_size)",
        "attention_scores_scalar or self.config.n_embd)",
        modules=ATTENTION,
        also=(ATTEND,),
    ),
    Bug(
        "silu_up",
        "the activation is applied to up, not gate",
        "F.silu(x_fc_1) * x_fc_2",
        "F.silu(x_fc_2) * x_fc_1",
        modules=(f"{BLOCK}.mlp", f"{LAYER}.mlp", f"{LAYER}.mlp.act_fn"),
    ),
    Bug(
        "norm_mean",
        "the norm subtracts the mean",
        "x_normed = x * torch.rsqrt(norm_x + self.eps)",
        "x_normed = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(norm_x + self.eps)",
        modules=NORMS,
    ),
    Bug(
        "stale_norm",
        "the second norm takes the layer's input",
        "            x = attention_output + x\n            x_normed = self.norm_2(x)",
        "            x_normed = self.norm_2(x)\n            x = attention_output + x",
        modules=(BLOCK, LAYER),
        golden=(f"{LAYER}.post_attention_layernorm*",),  # it is given another value
    ),
)

EXPERT = (f"{BLOCK}.mlp.experts.*", f"{LAYER}.mlp.experts")
MOE = (f"{BLOCK}.mlp", f"{LAYER}.mlp", f"{LAYER}.mlp.experts")
MIXTRAL_BUGS = (
    *BOTH,
    Bug(
        "experts_swapped",
        "two experts are swapped",
        convert=each(experts_swapped),
        modules=(*EXPERT, f"{EXPERT[0]}.*"),
    ),
    Bug(
        "router_rolled",
        "the router's rows are one off",
        convert=each(router_rolled),
        modules=(f"{BLOCK}.mlp.gate", f"{LAYER}.mlp.gate"),
    ),
    Bug(
        "gates_swapped",
        "gate and up of each expert are swapped",
        convert=each(gates_swapped),
        modules=(f"{EXPERT[0]}.fc_[12]", f"{LAYER}.mlp.experts"),
    ),
    Bug(
        "layer_off",
        "an output projection is that of the layer before",
        convert=layer_before("attn.proj"),
        modules=("transformer.h.2.attn.proj", "model.layers.2.self_attn.o_proj"),
    ),
    Bug(
        "not_normalised",
        "the weights of the chosen experts are not normalised",
        ROUTER,
        ROUTER_FIRST,
        modules=(f"{BLOCK}.mlp", f"{LAYER}.mlp", f"{LAYER}.mlp.gate"),
        golden=(f"{LAYER}.mlp.gate/Tensor.sum", f"{LAYER}.mlp.gate/Tensor.div_"),
    ),
    Bug(
        "overwritten",
        "the last expert of a token overwrites the others",
        "y[token_idx] += probs",
        "y[token_idx] = probs",
        modules=MOE,
        golden=(f"{LAYER}.mlp.experts/Tensor.index_add_",),
    ),
    Bug(
        "unweighted",
        "the experts are averaged without their weights",
        "probs[token_idx, expert_idx, None] * expert(x[token_idx])",
        "0.5 * expert(x[token_idx])",
        modules=MOE,
        golden=(f"{LAYER}.mlp.experts/Tensor.mul",),
    ),
    Bug(
        "one_expert",
        "each token goes to one expert",
        settings={"n_expert_per_token": 1},
        modules=(*MOE, f"{LAYER}.mlp.gate"),
    ),
)

PORTS = tuple(
    Port(
        name,
        source,
        original,
        partial(make, length=length),
        convert,
        golden_work,
        mine_work,
        llama_norms,
        bugs,
        length=length,
        package="litgpt",
        missing=partial(packages.missing, "litgpt"),
    )
    for name, original, golden_work, mine_work, bugs, length in (
        # generate gives the head the last token alone, here of a prompt of 70
        ("litgpt-llama", llama, partial(decode, keep=1), work, LLAMA_BUGS, 73),
        ("litgpt-mixtral", mixtral, decode, partial(work, whole_cache=False), MIXTRAL_BUGS, 15),
    )
)
