"""RWKV-4 of the package rwkv, one module with a dictionary of weights, against Hugging Face's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import transformers

from ports import packages
from ports.entry import DECODE, Bug, Logits, Model, Port, State, scratch, spread

WIDTH, LAYERS, VOCABULARY = 64, 3, 512
BLOCK = "rwkv.blocks.*"
MIXES = {"k": "key", "v": "value", "r": "receptance"}
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def source() -> Path:
    os.environ["RWKV_JIT_ON"] = os.environ["RWKV_CUDA_ON"] = "0"
    return packages.file("rwkv", "model.py")


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, context_length=64
    )
    model = transformers.RwkvForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "time_mix" in name:
                parameter.uniform_(0.1, 0.9)
            elif "time_" in name:
                parameter.normal_(-1, 0.5)
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the last norm alone: behind the others, a token is mixed with the one before."""
    yield hf.rwkv.ln_out, [hf.head]


def parts(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    prompt = ids.shape[1] - DECODE
    return (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1))


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    logits, state = [], None
    for part in parts(ids):
        out = model(part, state=state, use_cache=True)
        state = out.state
        logits.append(out.logits)
    return logits


@torch.no_grad()
def work(model: Model, ids: torch.Tensor) -> Logits:
    logits, state = [], None
    for part in parts(ids):
        out, state = model(part[0].tolist(), state, full_output=True)
        logits.append(out)
    return logits


def make(code: ModuleType, hf: Model) -> Model:
    """Return a model that reads its weights from a file, as the package does."""
    model = code.RWKV.__new__(code.RWKV)
    torch.nn.Module.__init__(model)
    model.load_state_dict = partial(load, model)
    return model


def load(model: Model, state: State, strict: bool) -> SimpleNamespace:
    start(model, state, torch.float32)
    return SimpleNamespace(missing_keys=[], unexpected_keys=[])


def start(model: Model, state: State, dtype: torch.dtype) -> None:
    path = scratch() / "rwkv.pth"
    torch.save(state, path)
    type(model).__init__(model, str(path), f"cpu {DTYPES[dtype]}", verbose=False)
    model.given = state
    model.eval()


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Load the weights again in that dtype: they are no parameters."""
    start(model, model.given, dtype)


def convert(hf: Model) -> State:
    given = hf.state_dict()
    state = {"emb.weight": given["rwkv.embeddings.weight"], "head.weight": given["head.weight"]}
    pairs = {"ln_out": "rwkv.ln_out", "blocks.0.ln0": "rwkv.blocks.0.pre_ln"}
    for n in range(LAYERS):
        old, new = f"rwkv.blocks.{n}", f"blocks.{n}"
        pairs |= {f"{new}.ln{k}": f"{old}.ln{k}" for k in (1, 2)}
        for ours, theirs, kinds in (("att", "attention", "kvr"), ("ffn", "feed_forward", "kr")):
            for kind in kinds:
                mix = given[f"{old}.{theirs}.time_mix_{MIXES[kind]}"]
                state[f"{new}.{ours}.time_mix_{kind}"] = mix
            for kind in ("key", "value", "receptance", "output"):
                if f"{old}.{theirs}.{kind}.weight" in given:
                    state[f"{new}.{ours}.{kind}.weight"] = given[f"{old}.{theirs}.{kind}.weight"]
        for name in ("time_decay", "time_first"):
            state[f"{new}.att.{name}"] = given[f"{old}.attention.{name}"]
    for ours, theirs in pairs.items():
        for kind in ("weight", "bias"):
            state[f"{ours}.{kind}"] = given[f"{theirs}.{kind}"]
    return state


# -- changes of weights --------------------------------------------------------------------------


def swapped(one: str, other: str, *layers: int) -> Callable[[State], None]:
    def change(state: State) -> None:
        for n in layers:
            a, b = f"blocks.{n}.{one}", f"blocks.{n}.{other}"
            state[a], state[b] = state[b], state[a]

    return change


def norms_swapped(state: State) -> None:
    for kind in ("weight", "bias"):
        swapped(f"ln1.{kind}", f"ln2.{kind}", 1)(state)


def transposed(state: State) -> None:
    for n in range(LAYERS):
        state[f"blocks.{n}.att.output.weight"] = state[f"blocks.{n}.att.output.weight"].T.clone()


def key_of_the_layer_before(state: State) -> None:
    state["blocks.2.ffn.key.weight"] = state["blocks.1.ffn.key.weight"].clone()


def no_bonus(state: State) -> None:
    for n in range(LAYERS):
        state[f"blocks.{n}.att.time_first"].zero_()


def first_norm_left(state: State) -> None:
    state["blocks.0.ln0.weight"].fill_(1)
    state["blocks.0.ln0.bias"].zero_()


ATTENTION, FORWARD = f"{BLOCK}.attention", f"{BLOCK}.feed_forward"
BUGS = (
    Bug(
        "mixes_swapped",
        "the shares of the token before are swapped for keys and receptances",
        convert=swapped("att.time_mix_k", "att.time_mix_r", *range(LAYERS)),
        modules=(ATTENTION,),
    ),
    Bug(
        "value_for_key",
        "keys and values of layer 1 are swapped",
        convert=swapped("att.key.weight", "att.value.weight", 1),
        modules=("rwkv.blocks.1.attention.key", "rwkv.blocks.1.attention.value"),
    ),
    Bug(
        "output_transposed",
        "the output matrices are transposed",
        convert=transposed,
        modules=(f"{ATTENTION}.output",),
    ),
    Bug(
        "norms_swapped",
        "the norms of layer 1 are swapped",
        convert=norms_swapped,
        modules=("rwkv.blocks.1.ln[12]",),
    ),
    Bug(
        "key_of_the_layer_before",
        "layer 2 has the feed-forward keys of layer 1",
        convert=key_of_the_layer_before,
        modules=("rwkv.blocks.2.feed_forward.key",),
    ),
    Bug(
        "no_bonus",
        "the weight of the newest token is not loaded",
        convert=no_bonus,
        modules=(ATTENTION,),
    ),
    Bug(
        "first_norm_left",
        "the norm of the embeddings stays as it was made",
        convert=first_norm_left,
        modules=("rwkv.blocks.0.pre_ln",),
    ),
    Bug(
        "decay_as_stored",
        "the decay is taken as it is stored",
        old="w[x] = -torch.exp(w[x].float())",
        new="w[x] = w[x].float()",
        modules=(ATTENTION,),
        early=True,
    ),
    Bug(
        "decay_for_bonus",
        "the newest token of a prompt gets the decay, not the bonus",
        old="ww = t_first + kk",
        new="ww = t_decay + kk",
        modules=(ATTENTION,),
    ),
    Bug(
        "not_received",
        "in a prompt, the receptance is not applied",
        old="matmul(r * sx, ow, omx, orx, omy, ory)",
        new="matmul(sx, ow, omx, orx, omy, ory)",
        modules=(ATTENTION,),
    ),
    Bug(
        "states_swapped",
        "numerator and denominator are put back in each other's place",
        old="x, state[i*5+0], state[i*5+1], state[i*5+2], state[i*5+3] = ATT(",
        new="x, state[i*5+0], state[i*5+2], state[i*5+1], state[i*5+3] = ATT(",
        modules=(ATTENTION,),
        also=(
            "def att_one(self, x, sx, aa ... wkv = ((e1 * aa",
            "def att_one(self, x, sx, aa ... return x + out",
        ),
    ),
    Bug(
        "one_shift",
        "the feed-forward part takes the last token from attention's state",
        old="offset = i*5+4",
        new="offset = i*5",
        modules=(FORWARD, ATTENTION),
        also=(
            "def ffn_one(self, x, sx ... kx = xx * k_mix",
            "def ffn_one(self, x, sx ... rx = xx * r_mix",
        ),
    ),
    Bug(
        "last_bias_left",
        "the last norm adds no bias",
        old="x = F.layer_norm(x, (args.n_embd,), weight=w['ln_out.weight'], bias=w['ln_out.bias'])",
        new="x = F.layer_norm(x, (args.n_embd,), weight=w['ln_out.weight'])",
        modules=("rwkv.ln_out",),
    ),
)
PORTS = (
    Port(
        "rwkv4",
        source,
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        prepare=prepare,
        missing=partial(packages.missing, "rwkv"),
    ),
)
