"""mambapy's Mamba, a state space model, against that of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ports import packages
from ports.entry import Logits
from ports.made import ported
from ports.steps import whole
from ports.weights import Model, hugging_face, norms_of

WIDTH, STATES, VOCABULARY, LAYERS, RANK = 64, 8, 512, 3, 4
BLOCK, LAYER = "mamba.layers.*", "backbone.layers.*"
SETTINGS = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "state_size": STATES,
    "num_hidden_layers": LAYERS, "time_step_rank": RANK, "initializer_range": 0.12,
    "tie_word_embeddings": True,
}  # fmt: skip
# its own initialisation is far below the scale of trained weights
original = hugging_face("MambaForCausalLM", SETTINGS, 0.12, stds={"A_log": 0, "conv1d": 0})
# what takes the last one's output is the embedding too
norms = norms_of("backbone.layers", {"norm": "mixer.in_proj"})


def work(model: Model, ids: torch.Tensor) -> Logits:
    with torch.autocast("cpu", model.precision, enabled=model.precision != torch.float32):
        return [model(ids)]


def source() -> Path:
    return packages.joined("mambapy", "pscan.py", "mamba.py", "lm.py")


def make(code: ModuleType, hf: Model, **settings: Any) -> Model:
    given: dict[str, Any] = {
        "d_model": WIDTH, "n_layers": LAYERS, "d_state": STATES, "dt_rank": RANK,
        "rms_norm_eps": hf.config.layer_norm_epsilon,
    }  # fmt: skip
    return code.LM(code.MambaConfig(**{**given, **settings}), VOCABULARY)


NAMES = {
    "lm_head": "lm_head",
    "embedding": "backbone.embeddings",
    "norm_f": "backbone.norm_f",
    "mamba.layers": "backbone.layers",
}


def prepare(model: Model, dtype: torch.dtype) -> None:
    """Let the scan have one dtype, as its decay is in float32: half precision is by autocast."""
    model.float().precision = dtype


MIXER = (f"{BLOCK}.mixer", f"{LAYER}.mixer")
NORMS = (f"{BLOCK}.norm", "norm_f", f"{LAYER}.norm", "backbone.norm_f")
OURS = "mamba.layers.*.mixer"
# in the package, the space after a hash is one that does not break
BUGS = r"""
gate_first: the two halves of the first projection are swapped
    weights each(lambda w: w.roll(len(w) // 2, 0), f"{OURS}.in_proj.weight")
    in $OURS.in_proj $LAYER.mixer.in_proj
c_before_b: B and C of the state space are swapped
    weights each(lambda w: reordered(w, (0, 2, 1), [RANK, STATES, STATES]), f"{OURS}.x_proj.weight")
    in $OURS.x_proj $LAYER.mixer.x_proj
kernel_flipped: the kernel of the convolution is mirrored
    weights each(lambda kernel: kernel.flip(2), f"{OURS}.conv1d.weight")
    in $OURS.conv1d $LAYER.mixer.conv1d
decay_twice: the decay is stored, not its logarithm
    weights each(torch.exp, f"{OURS}.A_log")
    in $MIXER
step_bias_left: the bias of the step is not loaded
    weights each(torch.zeros_like, f"{OURS}.dt_proj.bias")
    in $OURS.dt_proj $LAYER.mixer.dt_proj $MIXER
skip_left: the skip weights are not loaded
    weights each(torch.ones_like, f"{OURS}.D")
    in $MIXER
layer_off: an output projection is that of the layer before
    weights copy("mamba.layers.2.mixer.out_proj", "mamba.layers.1.mixer.out_proj")
    in mamba.layers.2.mixer.out_proj backbone.layers.2.mixer.out_proj
wrong_eps: eps of the norms is too large
    settings {"rms_norm_eps": 0.01}
    in $NORMS
not_causal: the convolution is centred, not causal
    - x = self.conv1d(x)[:, :, :L]
    + x = self.conv1d(x)[:, :, 1 : L + 1]
    in $MIXER
no_softplus: the step is made positive by ReLU
    - delta = F.softplus(delta + self.dt_proj.bias)
    + delta = F.relu(delta + self.dt_proj.bias)
    in $MIXER
    golden $LAYER.mixer/Functional.softplus
sign_left: the decay grows
    -         A = -torch.exp(self.A_log.float()) # (ED, N)
    -         D
    +         A = -torch.exp(-self.A_log.float()) # (ED, N)
    +         D
    in $MIXER
gate_sigmoid: the gate is a sigmoid, not SiLU
    -         z = F.silu(z)
    -
    -         output = y * z
    -         output = self.out_proj(output) # (B, L, D)
    +         z = F.sigmoid(z)
    +
    +         output = y * z
    +         output = self.out_proj(output) # (B, L, D)
    in $MIXER $LAYER.mixer.act
"""
PORTS = (ported(globals(), "mambapy", "mambapy", golden_work=whole, length=20),)
