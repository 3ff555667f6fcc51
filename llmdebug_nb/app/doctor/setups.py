"""Reading set-ups: of runs, live models and folders of checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from llmdebug_nb.app.doctor.gguf_setup import is_gguf, of_gguf
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.capture import setup as capture
from llmdebug_nb.capture.versions import versions
from llmdebug_nb.core.errors import LLMDebugError, OptionError, UnknownRunError
from llmdebug_nb.core.kernels.fingerprint import fingerprint
from llmdebug_nb.core.kernels.raw import dtype_name, to_bytes, unreadable
from llmdebug_nb.core.paths import module_path
from llmdebug_nb.core.records import Record
from llmdebug_nb.core.setups import Setup, Weight
from llmdebug_nb.store import catalog
from llmdebug_nb.store.checked import shape_of
from llmdebug_nb.store.layouts.pickled import is_saved
from llmdebug_nb.store.run import Run

NOT_RECORDED = "not recorded"
_SETUP = dict[str, dict[str, str]]
_MOST = 1 << 24  # bytes of a JSON file
_OF_MODEL = ("config", "generation", "model")
_FILTERS = ("layers", "types", "opname", "contains", "scope", "ids", "logits")
_IDS = 32  # of a prompt that are shown
_FEW = 3  # reasons that are listed
# files beside the weights that transformers' Trainer and accelerate write
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def of(what: object) -> Setup:
    """Return the set-up of a run (or its name or path), a model, a checkpoint, or a GGUF file.

    Raises OptionError, MissingPackageError, and the errors of `open_run`.
    """
    if isinstance(what, torch.nn.Module):
        return of_model(what)
    if isinstance(what, (str, os.PathLike)) and is_checkpoint(Path(what)):
        return of_checkpoint(Path(what))
    if isinstance(what, (str, os.PathLike)) and is_gguf(Path(what)):
        return of_gguf(Path(what))
    if isinstance(what, (Run, str, os.PathLike)):
        return of_run(open_run(what))
    raise OptionError(
        f"expected a run, its name or path, a model, or the folder of a checkpoint, got"
        f" {type(what).__name__}"
    )


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is a checkpoint: it has a config.json or files of weights."""
    if not path.is_dir() or catalog.is_run(path):
        return False
    return (path / "config.json").is_file() or bool(_weight_files(path))


# -- runs ------------------------------------------------------------------------------------------


def of_run(run: Run) -> Setup:
    """Return the set-up of a run; what older runs did not record is absent."""
    meta, absent = run.meta, dict[str, str]()
    facts: _SETUP = {}
    for key, sections in (("setup", ("switches", "random")), ("settings", _OF_MODEL)):
        try:
            facts |= msgspec.convert(meta.get(key) or {}, _SETUP)
        except msgspec.ValidationError:
            absent |= dict.fromkeys(sections, f"the recorded {key} is damaged")
    environment = meta.get("environment")
    if isinstance(environment, Mapping):
        facts["versions"] = {str(name): str(value) for name, value in environment.items()}
    facts["prompt"] = dict(_prompt(run))
    facts["modules"] = {f"class of {node.path}": node.type for node in run.nodes if node.path}
    for section in (*_OF_MODEL, "switches", "random", "versions", "prompt", "modules"):
        if not facts.get(section):
            absent.setdefault(section, _why_absent(facts, section))
    weights = dict(_recorded_weights(run))
    if not weights:
        absent["weights"] = NOT_RECORDED
    chosen = meta.get("options") or {}
    filters = [name for name in _FILTERS if chosen.get(name)]
    partial_ = f"{run.label} was recorded with {', '.join(filters)}" if filters else ""
    ties = [frozenset(group) for group in _module_ties(run)]
    return Setup(run.label, "run", facts, weights, tuple(ties), absent, partial_)


def _why_absent(facts: _SETUP, section: str) -> str:
    if section in _OF_MODEL and facts.get("model"):
        return f"the model has no {section}"
    return NOT_RECORDED


def _prompt(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the token ids that the first step of the first generation was given."""
    numbers = run.index.token_ids()
    if not numbers:
        return
    number = numbers[min(numbers, key=lambda key: (key[0] < 0, key))]
    try:
        ids = run.load(run.record(number))
    except LLMDebugError:
        return
    yield "shape", str(list(ids.shape))
    flat = ids.flatten().tolist()
    yield "ids", ", ".join(map(str, flat[:_IDS])) + (" …" if len(flat) > _IDS else "")
    yield "fingerprint of the ids", fingerprint(to_bytes(ids.long()))


def _recorded_weights(run: Run) -> Iterator[tuple[str, Weight]]:
    for row in run.index.scalars(role="weight"):
        dtype, _, shape = row.type.partition(" ")
        try:
            sizes = shape_of(shape)
        except (ValueError, RecursionError):
            continue
        yield _name(row.path, row.slot), Weight(dtype, sizes, row.value)
    for record in run.records(role="weight", phase="forward"):
        yield _name(record.site.path, record.site.slot), _weight(run, record)


def _weight(run: Run, record: Record) -> Weight:
    summary = record.summary
    load = None if record.payload is None or record.kept else partial(run.load, record)
    return Weight(summary.dtype, summary.shape, summary.fingerprint, load)


def _name(path: str, slot: str) -> str:
    return f"{path}.{slot}" if path else slot


def _module_ties(run: Run) -> Iterator[set[str]]:
    """Yield the names of the weights of modules that are one object."""
    for node in run.nodes:
        if node.aliases:
            for parameter in node.params:
                yield {_name(path, parameter) for path in (node.path, *node.aliases)}


# -- live models -----------------------------------------------------------------------------------


def of_model(model: torch.nn.Module) -> Setup:
    """Return the set-up of a live model and of this process."""
    facts = {**capture.here(), **capture.of_models([model]), "versions": versions()}
    facts["modules"] = {
        f"class of {module_path(name)}": type(part).__name__
        for name, part in model.named_modules()
        if name
    }
    absent = {name: f"the model has no {name}" for name in _OF_MODEL if name not in facts}
    absent["prompt"] = "a model has none"
    saved = set(model.state_dict(keep_vars=True))
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]  # fmt: skip
    weights = {
        module_path(name): Weight(
            dtype_name(t), tuple(t.shape), None, partial(t.detach), name in saved
        )
        for name, t in named
    }
    name = type(model).__name__
    return Setup(name, "model", facts, weights, tuple(capture.ties(model)), absent)


# -- checkpoints -----------------------------------------------------------------------------------


def of_checkpoint(folder: Path) -> Setup:
    """Return the set-up of a folder with config.json and files of tensors; no code of it runs."""
    facts, absent = dict[str, dict[str, str]](), dict[str, str]()
    for section, file in (("config", "config.json"), ("generation", "generation_config.json")):
        found = _json(folder / file)
        if found is None:
            absent[section] = f"no {file} that can be read"
        else:
            facts[section] = capture.settings(found)
    tokenizer = _tokenizer_files(folder)
    if tokenizer:
        facts["tokenizer"] = tokenizer
    for section in ("model", "modules", "switches", "random", "versions", "prompt"):
        absent[section] = "a checkpoint has none"
    weights, lacks = _stored_weights(folder)
    if not weights:
        why = lacks or "it has no tensors in .safetensors, .bin, .pt or .pth"
        absent["weights"] = why
    return Setup(folder.name, "checkpoint", facts, weights, (), absent, lacks)


def _stored_weights(folder: Path) -> tuple[dict[str, Weight], str]:
    """Return the tensors of all files, by their names in them, and why some may be missing."""
    weights, lacks = dict[str, Weight](), list[str]()
    files = _weight_files(folder)
    for file in files or [folder]:
        try:
            run = open_run(file)
            for record in run.records(role="output"):
                if record.lost is None:
                    weights[record.site.path] = _weight(run, record)
                else:
                    lacks.append(f"{record.site.path}: {record.lost}")
        except UnknownRunError as error:
            lacks += [str(error)] * bool(files)
        except LLMDebugError as error:
            lacks.append(str(error))
    absent = sorted(_indexed(folder, files) - {file.name for file in files})
    lacks += [f"{folder.name} lacks {name}, which its index names" for name in absent]
    if len(lacks) > _FEW:
        lacks[_FEW:] = [f"and {len(lacks) - _FEW:,} more"]
    return weights, "; ".join(lacks)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder: safetensors, or else those of `torch.save`.

    Many folders have both, of the same weights. transformers loads the first.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    safe = [file for file in files if file.suffix == ".safetensors"]
    return safe or [
        file for file in files
        if file.suffix in (".pt", ".pth", ".bin") and file.stem not in _OF_TRAINING
        and is_saved(file)
    ]  # fmt: skip


def _indexed(folder: Path, files: list[Path]) -> set[str]:
    """Return the names of files that the index of the same format names; none is opened for it."""
    suffixes = {file.suffix for file in files} or {".safetensors", ".bin"}
    found: set[str] = set()
    for index in folder.glob("*.index.json"):
        names = (_json(index) or {}).get("weight_map")
        if isinstance(names, Mapping):
            found |= {str(name) for name in names.values() if Path(str(name)).suffix in suffixes}
    return found


def _json(file: Path) -> dict[str, object] | None:
    try:
        if file.is_symlink() and not file.resolve().is_file():
            return None
        if file.stat().st_size > _MOST:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _tokenizer_files(folder: Path) -> dict[str, str]:
    """Return what the files of a tokenizer say; it is not loaded."""
    found: dict[str, str] = {}
    config = _json(folder / "tokenizer_config.json") or {}
    template: object = config.pop("chat_template", None)
    file = folder / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= _MOST:
        template = file.read_text(encoding="utf-8", errors="replace")
    if template is not None:
        text = template if isinstance(template, str) else json.dumps(template)
        found["chat template"] = fingerprint(text.encode()) + f" ({len(text):,} characters)"
    config.pop("added_tokens_decoder", None)
    found |= {name: value for name, value in capture.settings(config).items() if value != "null"}
    vocabulary = folder / "tokenizer.json"
    if vocabulary.is_file():
        found["ids (tokenizer.json)"] = fingerprint(vocabulary.read_bytes())
    return found


def value_of(weight: Weight) -> torch.Tensor | None:
    """Read a weight; None if it can't be read."""
    if weight.load is None:
        return None
    try:
        tensor = weight.load()
    except LLMDebugError:
        return None
    return None if unreadable(tensor) else tensor


def content_of(weight: Weight) -> str | None:
    """Return the fingerprint of a weight; None if it is unknown."""
    if weight.fingerprint is not None:
        return weight.fingerprint
    tensor = value_of(weight)
    return None if tensor is None else fingerprint(to_bytes(tensor))
