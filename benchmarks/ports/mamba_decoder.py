"""mambapy's Mamba, a state space model, against that of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from ports import packages
from ports.entry import Bug, Logits, Model, Port, State, spread

WIDTH, STATES, VOCABULARY, LAYERS = 64, 8, 512, 3
INNER, RANK = 2 * WIDTH, 4
BLOCK, LAYER = "mamba.layers.*", "backbone.layers.*"


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=STATES,
        num_hidden_layers=LAYERS,
        time_step_rank=RANK,
        initializer_range=0.12,
        tie_word_embeddings=True,
    )
    model = transformers.MambaForCausalLM(config)
    with torch.no_grad():  # its own initialisation is far below the scale of trained weights
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.normal_(0, 0.12)
    return spread(model, seed)


def norms(hf: Model) -> Iterator[tuple[Model, list[Model]]]:
    """Yield the norms but the last one: what takes its output is the embedding too."""
    for layer in hf.backbone.layers:
        yield layer.norm, [layer.mixer.in_proj]


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    return [model(ids, use_cache=False).logits]


def work(model: Model, ids: torch.Tensor) -> Logits:
    with torch.autocast("cpu", model.precision, enabled=model.precision != torch.float32):
        return [model(ids)]


# -- the port ------------------------------------------------------------------------------------


def source() -> Path:
    return packages.joined("mambapy", "pscan.py", "mamba.py", "lm.py")


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "d_model": WIDTH,
        "n_layers": LAYERS,
        "d_state": STATES,
        "dt_rank": RANK,
        "rms_norm_eps": hf.config.layer_norm_epsilon,
    }
    return code.LM(code.MambaConfig(**{**given, **settings}), VOCABULARY)


def convert(hf: Model) -> State:
    """Return the weights under mambapy's names."""
    state = {}
    for name, value in hf.state_dict().items():
        start, _, rest = name.partition(".")
        if start == "lm_head":
            state[name] = value
        elif rest.startswith("embeddings"):
            state["embedding.weight"] = value
        else:
            state[rest if rest.startswith("norm_f") else f"mamba.{rest}"] = value
    return state


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Let the scan have one dtype, as its decay is in float32: half precision is by autocast."""
    model.float().precision = dtype


# -- changes of weights --------------------------------------------------------------------------


def each(change: Callable[[State, str], None]) -> Callable[[State], None]:
    """Return what changes the weights of each layer. ``change(state, path of the mixer)``."""

    def apply(state: State) -> None:
        for n in range(LAYERS):
            change(state, f"mamba.layers.{n}.mixer")

    return apply


def gate_first(state: State, path: str) -> None:
    name = f"{path}.in_proj.weight"
    state[name] = torch.cat(state[name].chunk(2)[::-1])


def c_before_b(state: State, path: str) -> None:
    name = f"{path}.x_proj.weight"
    step, b, c = state[name].split([RANK, STATES, STATES])
    state[name] = torch.cat([step, c, b])


def kernel_flipped(state: State, path: str) -> None:
    name = f"{path}.conv1d.weight"
    state[name] = state[name].flip(2)


def decay_twice(state: State, path: str) -> None:
    """Store the decay, not its logarithm."""
    state[f"{path}.A_log"] = state[f"{path}.A_log"].exp()


def step_bias_left(state: State, path: str) -> None:
    state[f"{path}.dt_proj.bias"].zero_()


def skip_left(state: State, path: str) -> None:
    state[f"{path}.D"].fill_(1)


def layer_before(state: State) -> None:
    name = "mamba.layers.{}.mixer.out_proj.weight"
    state[name.format(2)] = state[name.format(1)].clone()


# -- bugs ----------------------------------------------------------------------------------------

MIXER = (f"{BLOCK}.mixer", f"{LAYER}.mixer")
NORMS = (f"{BLOCK}.norm", "norm_f", f"{LAYER}.norm", "backbone.norm_f")
GATED = """        z = F.silu(z)

        output = y * z
        output = self.out_proj(output) #\N{NO-BREAK SPACE}(B, L, D)"""
BUGS = (
    Bug(
        "gate_first",
        "the two halves of the first projection are swapped",
        convert=each(gate_first),
        modules=(f"{BLOCK}.mixer.in_proj", f"{LAYER}.mixer.in_proj"),
    ),
    Bug(
        "c_before_b",
        "B and C of the state space are swapped",
        convert=each(c_before_b),
        modules=(f"{BLOCK}.mixer.x_proj", f"{LAYER}.mixer.x_proj"),
    ),
    Bug(
        "kernel_flipped",
        "the kernel of the convolution is mirrored",
        convert=each(kernel_flipped),
        modules=(f"{BLOCK}.mixer.conv1d", f"{LAYER}.mixer.conv1d"),
    ),
    Bug(
        "decay_twice",
        "the decay is stored, not its logarithm",
        convert=each(decay_twice),
        modules=MIXER,
    ),
    Bug(
        "step_bias_left",
        "the bias of the step is not loaded",
        convert=each(step_bias_left),
        modules=(f"{BLOCK}.mixer.dt_proj", f"{LAYER}.mixer.dt_proj", *MIXER),
    ),
    Bug("skip_left", "the skip weights are not loaded", convert=each(skip_left), modules=MIXER),
    Bug(
        "layer_off",
        "an output projection is that of the layer before",
        convert=layer_before,
        modules=("mamba.layers.2.mixer.out_proj", "backbone.layers.2.mixer.out_proj"),
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is too large",
        settings={"rms_norm_eps": 1e-2},
        modules=NORMS,
    ),
    Bug(
        "not_causal",
        "the convolution is centred, not causal",
        "x = self.conv1d(x)[:, :, :L]",
        "x = self.conv1d(x)[:, :, 1 : L + 1]",
        modules=MIXER,
    ),
    Bug(
        "no_softplus",
        "the step is made positive by ReLU",
        "delta = F.softplus(delta + self.dt_proj.bias)",
        "delta = F.relu(delta + self.dt_proj.bias)",
        modules=MIXER,
        golden=(f"{LAYER}.mixer/Functional.softplus",),
    ),
    Bug(
        "sign_left",
        "the decay grows",
        "        A = -torch.exp(self.A_log.float()) # (ED, N)\n        D",
        "        A = -torch.exp(-self.A_log.float()) # (ED, N)\n        D",
        modules=MIXER,
    ),
    Bug(
        "gate_sigmoid",
        "the gate is a sigmoid, not SiLU",
        GATED,
        GATED.replace("silu", "sigmoid"),
        modules=(*MIXER, f"{LAYER}.mixer.act"),
    ),
)

PORTS = (
    Port(
        "mambapy",
        source,
        original,
        make,
        convert,
        golden_work,
        work,
        norms,
        BUGS,
        length=20,
        package="mambapy",
        prepare=prepare,
        missing=partial(packages.missing, "mambapy"),
    ),
)
