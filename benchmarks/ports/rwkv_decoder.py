"""RWKV-4 of the package rwkv, one module with a dictionary of weights, against Hugging Face's."""

from __future__ import annotations

import os
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from ports import packages
from ports.entry import Logits, scratch
from ports.made import ported
from ports.steps import parts
from ports.weights import Model, State, hugging_face, norms_of, renamed

BLOCK = "rwkv.blocks.*"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SETTINGS = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "context_length": 64}


@cache
def source() -> Path:
    os.environ["RWKV_JIT_ON"] = os.environ["RWKV_CUDA_ON"] = "0"
    return packages.file("rwkv", "model.py")


def trained(model: Model) -> None:
    """Give the weights the scale of trained ones."""
    for name, parameter in model.named_parameters():
        if "time_mix" in name:
            parameter.uniform_(0.1, 0.9)
        elif "time_" in name:
            parameter.normal_(-1, 0.5)
        elif parameter.ndim == 2:
            parameter.normal_(0, 0.2)


original = hugging_face("RwkvForCausalLM", SETTINGS, change=trained)
# the last norm alone: behind the others, a token is mixed with the one before
norms = norms_of(last={"rwkv.ln_out": "head"})


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


NAMES = {
    "emb": "rwkv.embeddings",
    "head": "head",
    "ln_out": "rwkv.ln_out",
    "blocks.0.ln0": "rwkv.blocks.0.pre_ln",
    "blocks.*.{ln1,ln2,att,ffn}": "rwkv.blocks.*.{ln1,ln2,attention,feed_forward}",
}


def convert(hf: Model) -> State:
    state = renamed(hf.state_dict(), NAMES)
    mixes = {f"time_mix_{kind}": f"time_mix_{kind[0]}" for kind in ("key", "value", "receptance")}
    ends = {name: name.rpartition(".")[2] for name in state}
    return {name.removesuffix(end) + mixes.get(end, end): state[name] for name, end in ends.items()}


ATTENTION, FORWARD = f"{BLOCK}.attention", f"{BLOCK}.feed_forward"
BUGS = r"""
mixes_swapped: the shares of the token before are swapped for keys and receptances
    weights swap("blocks.*.att.time_mix_k", "blocks.*.att.time_mix_r")
    in $ATTENTION
value_for_key: keys and values of layer 1 are swapped
    weights swap("blocks.1.att.key", "blocks.1.att.value")
    in rwkv.blocks.1.attention.key rwkv.blocks.1.attention.value
output_transposed: the output matrices are transposed
    weights transpose("blocks.*.att.output.weight")
    in $ATTENTION.output
norms_swapped: the norms of layer 1 are swapped
    weights swap("blocks.1.ln1", "blocks.1.ln2")
    in rwkv.blocks.1.ln[12]
key_of_the_layer_before: layer 2 has the feed-forward keys of layer 1
    weights copy("blocks.2.ffn.key", "blocks.1.ffn.key")
    in rwkv.blocks.2.feed_forward.key
no_bonus: the weight of the newest token is not loaded
    weights each(torch.zeros_like, "blocks.*.att.time_first")
    in $ATTENTION
first_norm_left: the norm of the embeddings stays as it was made
    weights as_made("blocks.0.ln0")
    in rwkv.blocks.0.pre_ln
decay_as_stored: the decay is taken as it is stored
    - w[x] = -torch.exp(w[x].float())
    + w[x] = w[x].float()
    in $ATTENTION
    early
decay_for_bonus: the newest token of a prompt gets the decay, not the bonus
    - ww = t_first + kk
    + ww = t_decay + kk
    in $ATTENTION
not_received: in a prompt, the receptance is not applied
    - matmul(r * sx, ow, omx, orx, omy, ory)
    + matmul(sx, ow, omx, orx, omy, ory)
    in $ATTENTION
states_swapped: numerator and denominator are put back in each other's place
    - x, state[i*5+0], state[i*5+1], state[i*5+2], state[i*5+3] = ATT(
    + x, state[i*5+0], state[i*5+2], state[i*5+1], state[i*5+3] = ATT(
    in $ATTENTION
    also def att_one(self, x, sx, aa ... wkv = ((e1 * aa
    also def att_one(self, x, sx, aa ... return x + out
one_shift: the feed-forward part takes the last token from attention's state
    - offset = i*5+4
    + offset = i*5
    in $FORWARD $ATTENTION
    also def ffn_one(self, x, sx ... kx = xx * k_mix
    also def ffn_one(self, x, sx ... rx = xx * r_mix
last_bias_left: the last norm adds no bias
    - x = F.layer_norm(x, (args.n_embd,), weight=w['ln_out.weight'], bias=w['ln_out.bias'])
    + x = F.layer_norm(x, (args.n_embd,), weight=w['ln_out.weight'])
    in rwkv.ln_out
"""
PORTS = (ported(globals(), "rwkv4", "rwkv", package=""),)
