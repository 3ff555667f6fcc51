"""What a program says of its set-up: switches, random numbers, and the models' settings.

Nothing here changes anything. What can't be asked for is left out.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from llmdebug_nb.core.masking import masked
from llmdebug_nb.core.places import shown

_TEXT = 200  # characters of a value
_MOST = 2000  # settings of a config
Facts = dict[str, dict[str, str]]


def _switches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each switch of torch, and what asks for it."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    yield "default dtype", lambda: str(torch.get_default_dtype()).removeprefix("torch.")
    yield "float32 matmul precision", torch.get_float32_matmul_precision
    yield "TF32 in matmul", lambda: cuda.matmul.allow_tf32
    yield "TF32 in cuDNN", lambda: cudnn.allow_tf32
    yield (
        "reduced precision in float16 sums",
        lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    )
    yield (
        "reduced precision in bfloat16 sums",
        lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled
    yield "cuDNN deterministic", lambda: cudnn.deterministic
    yield "cuDNN benchmark", lambda: cudnn.benchmark
    yield "SDPA flash", cuda.flash_sdp_enabled
    yield "SDPA memory-efficient", cuda.mem_efficient_sdp_enabled
    yield "SDPA math", cuda.math_sdp_enabled
    yield "SDPA cuDNN", cuda.cudnn_sdp_enabled
    yield "oneDNN", torch.backends.mkldnn.is_available
    yield "autocast on CPU", lambda: _autocast("cpu")
    yield "autocast on CUDA", lambda: _autocast("cuda")
    yield "threads", torch.get_num_threads
    yield "instructions of the CPU", torch.backends.cpu.get_cpu_capability


def _autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def switches() -> dict[str, str]:
    """Return the switches of torch that change numbers or kernels."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names are deprecated in some releases
        for name, ask in _switches():
            try:
                found[name] = str(ask())
            except (RuntimeError, AttributeError, TypeError):
                continue
    return found


def randomness() -> dict[str, str]:
    """Return the seed of torch, and fingerprints of the states of all generators."""
    found = {
        "seed of torch": str(torch.initial_seed()),
        "state of torch": _digest(bytes(torch.get_rng_state().numpy())),
        "state of Python": _digest(pickle.dumps(random.getstate(), 4)),
    }
    numbers = sys.modules.get("numpy.random")  # loaded, and seeded, when it is first used
    if numbers is not None:
        state = numbers.get_state(legacy=True)
        found["state of NumPy"] = _digest(
            pickle.dumps((state[0], state[1].tobytes(), state[2:]), 4)
        )
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def here() -> Facts:
    """Return the facts of this process."""
    return {"switches": switches(), "random": randomness()}


def of_models(models: Iterable[torch.nn.Module]) -> Facts:
    """Return the facts of models: class, dtypes, attention, config, generation config.

    Those of a further model have its class in front.
    """
    facts: Facts = {"model": {}, "config": {}, "generation": {}}
    for number, model in enumerate(models):
        before = f"{type(model).__name__}: " if number else ""
        found = {
            "model": _model(model),
            "config": settings(getattr(model, "config", None)),
            "generation": settings(getattr(model, "generation_config", None)),
        }
        for section, values in found.items():
            facts[section] |= {f"{before}{name}": value for name, value in values.items()}
    return {section: values for section, values in facts.items() if values}


def _model(model: torch.nn.Module) -> dict[str, str]:
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    devices = {p.device.type for p in model.parameters()}
    found = {
        "class": type(model).__name__,
        "dtypes of parameters": ", ".join(sorted(dtypes)),
        "devices": ", ".join(sorted(devices)),
        "training mode": _training(model),
        "tied weights": "; ".join(" = ".join(sorted(group)) for group in ties(model)) or "none",
    }
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(attention, str):
        found["attention"] = attention
    return {name: text[:_TEXT] for name, text in found.items()}


def _training(model: torch.nn.Module) -> str:
    """Return whether a model is in training mode, or which of its modules are."""
    names = [name or "(root)" for name, part in model.named_modules() if part.training]
    total = sum(1 for _ in model.modules())
    if len(names) in (0, total):
        return "on" if names else "off"
    return f"on in {len(names)} of {total} modules: {', '.join(names)}"


def ties(model: torch.nn.Module) -> list[frozenset[str]]:
    """Return the groups of names that have one parameter."""
    names: dict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    return [frozenset(group) for group in names.values() if len(group) > 1]


def settings(config: object) -> dict[str, str]:
    """Return the settings of a config as texts, by dotted name: those of ``to_dict()``."""
    ask = getattr(config, "to_dict", None)
    try:
        found = ask() if callable(ask) else config
    except Exception:  # the config is the program's: it may raise anything
        return {}
    if not isinstance(found, Mapping):
        return {}
    flat: dict[str, str] = {}
    for name, value in _flat(found):
        if len(flat) == _MOST:
            break
        flat[name] = value
    return flat


def _flat(
    values: Mapping[object, object], before: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{before}{key}"[:_TEXT]
        if isinstance(value, Mapping) and depth < 8:
            yield from _flat(value, f"{name}.", depth + 1)
        else:
            text = _text(value)
            # num_key_value_heads, eos_token_id: numbers are no secrets
            if not isinstance(value, (int, float)):
                text = masked(text, str(key))
            yield name, text[:_TEXT]


def _text(value: object) -> str:
    """Return a value as JSON; a dtype or a path as a dump names it."""
    if isinstance(value, torch.dtype):
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        return shown(value) if "/" in value else value
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
