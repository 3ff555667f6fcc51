"""A GGUF file as a set-up: its metadata under the names of config.json, its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmdebug_nb.capture.engines.gguf_file import GGUFFile, read
from llmdebug_nb.capture.engines.gguf_values import DTYPES
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.setups import Setup, Weight

SUFFIX = ".gguf"
_NONE = ("model", "modules", "switches", "random", "versions", "prompt", "generation")


@dataclass(frozen=True)
class GGUFSetup(Setup):
    """The set-up of a GGUF file. Its weights have the names of GGUF."""

    file: GGUFFile = field(default_factory=lambda: GGUFFile("", {}, {}))


@dataclass(frozen=True, slots=True)
class _Setting:
    """A setting of GGUF, and its names in config.json; the first that is there counts.

    ``without``: what llama.cpp takes where the file says nothing: a number, the key of another
    setting, or None if it goes without.
    """

    key: str
    names: tuple[str, ...]
    without: float | str | None = None


_SETTINGS = (
    _Setting("embedding_length", ("hidden_size",)),
    _Setting("feed_forward_length", ("intermediate_size",)),
    _Setting("block_count", ("num_hidden_layers",)),
    _Setting("context_length", ("max_position_embeddings",)),
    _Setting("attention.head_count", ("num_attention_heads",)),
    _Setting("attention.head_count_kv", ("num_key_value_heads", "num_attention_heads"),
             "attention.head_count"),
    _Setting("attention.key_length", ("head_dim",)),
    _Setting("attention.value_length", ("head_dim",)),
    _Setting("rope.dimension_count", ("head_dim",)),
    _Setting("attention.layer_norm_rms_epsilon", ("rms_norm_eps",)),
    _Setting("rope.freq_base", ("rope_parameters.rope_theta", "rope_theta"), 10000.0),
    _Setting("rope.scaling.factor", ("rope_parameters.factor", "rope_scaling.factor")),
    _Setting("attention.sliding_window", ("sliding_window",)),
    _Setting("attn_logit_softcapping", ("attn_logit_softcapping",)),
    _Setting("final_logit_softcapping", ("final_logit_softcapping",)),
    _Setting("expert_count", ("num_local_experts", "num_experts")),
    _Setting("expert_used_count", ("num_experts_per_tok",)),
    _Setting("expert_feed_forward_length", ("moe_intermediate_size",)),
    _Setting("expert_shared_feed_forward_length", ("shared_expert_intermediate_size",)),
)  # fmt: skip
_TOKENS = ("bos", "eos", "padding")


def is_gguf(path: Path) -> bool:
    """Tell whether a path is a GGUF file."""
    return path.suffix == SUFFIX and path.is_file()


def of_gguf(path: Path) -> GGUFSetup:
    """Return the set-up of a GGUF file. Raises MissingPackageError and CorruptDumpError."""
    file = read(path)
    weights = {
        name: Weight(DTYPES.get(each.kind, each.kind.lower()), each.shape)
        for name, each in file.tensors.items()
    }
    absent = dict.fromkeys(_NONE, "a GGUF file has none")
    parts = file.number("split.count") or 1
    if not weights:
        absent["weights"] = "it has no tensors"
    lacks = f"{path.name} is one of {parts} parts; the others are not read" if parts > 1 else ""
    facts = {"tokenizer": dict(_tokenizer(file)), "config": dict(file_settings(file))}
    return GGUFSetup(path.name, "checkpoint", facts, weights, (), absent, lacks, file)


def file_settings(file: GGUFFile) -> Iterator[tuple[str, str]]:
    """Yield the settings of a file under their names in GGUF."""
    arch = file.text("general.architecture")
    yield "architecture", arch
    for each in _SETTINGS:
        found = _number(file, arch, each)
        if found is not None:
            yield each.key, text(found)


def config(file: GGUFFile, other: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings that both sides know: of config.json, and of the file under its names.

    Numbers are compared in float32, which GGUF has. What config.json leaves out follows.
    """
    arch = file.text("general.architecture")
    golden, mine = dict[str, str](), dict[str, str]()
    known = {**other, **_derived(other)}
    for each in _SETTINGS:
        name = next((name for name in each.names if known.get(name, "null") != "null"), None)
        wanted = None if name is None else _as_number(known[name])
        found = _number(file, arch, each)
        if name is None or wanted is None:
            continue
        if found is None and each.key in _ASKED:
            if each.key == "attention.sliding_window" and not _slides(known, wanted):
                continue
            golden[f"{name} ({each.key})"] = known[name]
            mine[f"{name} ({each.key})"] = "not in the file"
        elif found is not None:
            same = np.float32(found) == np.float32(wanted)
            golden[f"{name} ({each.key})"] = known[name]
            mine[f"{name} ({each.key})"] = known[name] if same else text(found)
    return golden, mine


# without these, llama.cpp computes something else than the config asks for
_ASKED = (
    "attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
    "rope.scaling.factor", "expert_count", "expert_used_count", "attention.layer_norm_rms_epsilon",
)  # fmt: skip


def _slides(known: Mapping[str, str], window: float) -> bool:
    """Tell whether the window of a config ever hides a token."""
    longest = _as_number(known.get("max_position_embeddings", ""))
    used = known.get("use_sliding_window", "true").lower() != "false"
    return used and (longest is None or window < longest)


def _derived(known: Mapping[str, str]) -> dict[str, str]:
    """Return the size of a head, where config.json leaves it to the sizes of the model."""
    if known.get("head_dim", "null") != "null":
        return {}
    width, heads = (_as_number(known.get(n, "")) for n in ("hidden_size", "num_attention_heads"))
    return {"head_dim": text(width // heads)} if width and heads else {}


def _number(file: GGUFFile, arch: str, setting: _Setting) -> int | float | None:
    found = file.number(f"{arch}.{setting.key}")
    if found is None and isinstance(setting.without, str):
        return file.number(f"{arch}.{setting.without}")
    if found is None and not isinstance(setting.without, str):
        found = setting.without
    if found is None and setting.key in ("attention.key_length", "attention.value_length"):
        width, heads = (
            file.number(f"{arch}.{key}") for key in ("embedding_length", "attention.head_count")
        )
        return width // heads if width and heads else None
    return found


def _as_number(value: str) -> float | None:
    try:
        found = float(value)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def text(value: int | float) -> str:
    """Return a number as short as float32 allows."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(value)
    return str(float(str(np.float32(value)))) if isinstance(value, float) else str(value)


def _tokenizer(file: GGUFFile) -> Iterator[tuple[str, str]]:
    """Yield what the file says of its tokenizer, in the words of a checkpoint's files."""
    template = file.text("tokenizer.chat_template")
    if template:
        yield "chat template", f"{fingerprint(template.encode())} ({len(template):,} characters)"
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        yield "number of tokens", str(len(tokens))
