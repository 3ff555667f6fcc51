"""The runtimes whose models are recorded stand in one list, which all others read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from llmdebug_nb.app.launching import children, program
from llmdebug_nb.app.live_models import compilable_in, models_in
from llmdebug_nb.capture.listeners import Listeners
from llmdebug_nb.capture.runtimes import PACKAGES, RUNTIMES, either
from llmdebug_nb.capture.versions import versions
from llmdebug_nb.core.errors import OptionError

PACKAGE = Path(__file__).parent.parent / "llmdebug_nb"
# a runtime's own folder, its names in other libraries, the list, and an entry point of its own
OWN = (
    "capture/onnx/", "capture/openvino/", "capture/engines/", "capture/compat/",
    "capture/runtimes.py", "app/launching/vllm_plugin.py",
)  # fmt: skip
STORED = "core/records.py"  # the prefixes of operators, as dumps have them


def _code(tree: ast.AST) -> Iterator[str]:
    """Yield the names and texts of code, but no docstrings."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            is_docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
            if isinstance(child, ast.Constant) and not is_docstring:
                yield str(child.value)
        for name in ("id", "attr", "name", "module", "arg", "asname"):
            yield str(getattr(node, name, "") or "")


def _naming(path: Path) -> set[str]:
    text = "\n".join(_code(ast.parse(path.read_text(encoding="utf-8")))).lower()
    return {each.package for each in RUNTIMES if each.package in text}


def test_only_a_runtimes_own_modules_name_its_package():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    named = {name: _naming(path) for name, path in paths.items()}
    others = {name: found for name, found in named.items() if found and not name.startswith(OWN)}
    assert others == {STORED: {"openvino"}}
    assert set.union(*(named[name] for name in named if name.startswith(OWN))) == {
        each.package for each in RUNTIMES
    }


def test_what_knows_the_runtimes_loads_nothing_of_them_nor_torch():
    code = "import sys, llmdebug_nb.capture.runtimes; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    ours = {name for name in loaded.split() if name.startswith("llmdebug_nb.capture.")}
    assert not {"torch", "numpy", *(each.package for each in RUNTIMES)} & set(loaded.split())
    assert len(ours) == 2 + len(RUNTIMES) + 3, ours  # the list, a module each, and their folders


@pytest.mark.parametrize("runtime", RUNTIMES, ids=lambda each: each.package)
def test_a_model_is_known_by_its_class_once_the_program_has_imported_that(
    runtime, monkeypatch: pytest.MonkeyPatch
):
    for name in runtime.classes:
        module, _, kind = name.rpartition(".")
        monkeypatch.delitem(sys.modules, module, raising=False)
        fake = ModuleType(module)
        setattr(fake, kind, type(kind, (), {}))
        model = getattr(fake, kind)()
        assert not runtime.is_model(model)
        assert module not in sys.modules
        monkeypatch.setitem(sys.modules, module, fake)
        assert [each for each in RUNTIMES if each.is_model(model)] == [runtime]
        assert not runtime.is_model(getattr(fake, kind))  # the class itself is no model
        assert models_in([model]) == (model,)
        monkeypatch.setitem(sys.modules, module, None)  # importing it is forbidden
        assert not runtime.is_model(model)


def test_a_refused_model_names_what_can_be_recorded():
    with pytest.raises(OptionError) as all_of:
        models_in(3)
    with pytest.raises(OptionError) as compiled:
        compilable_in(3)
    assert [str(error.value) for error in (all_of, compiled)] == [
        "model: expected a torch.nn.Module, an onnxruntime.InferenceSession, an"
        " openvino.CompiledModel, a vllm.LLM or a llama_cpp.Llama, got int; leave it out to record"
        " whatever runs",
        "model: expected a torch.nn.Module or a vllm.LLM, got int; leave it out to record whatever"
        " runs",
    ]


def test_a_launcher_waits_for_torch_and_for_each_runtime_that_runs_graphs():
    graphs = [each for each in RUNTIMES if each.source is not None]
    assert PACKAGES == ("torch", "onnxruntime", "openvino", "llama_cpp")
    assert PACKAGES[1:] == tuple(each.package for each in graphs)
    assert len({id(each.source().listeners) for each in graphs}) == len(graphs)
    assert program.why_nothing({}) == (
        "no Python that could be reached imported torch, onnxruntime, openvino or llama_cpp"
    )
    for each in graphs:
        assert each.libraries
        assert {*each.libraries} < {*children._LIBRARIES}
    assert either(["a"]) == "a"


def test_a_run_knows_the_release_of_a_runtime_that_the_program_has_imported(
    monkeypatch: pytest.MonkeyPatch,
):
    for runtime in RUNTIMES:
        module = ModuleType(runtime.package)
        module.__version__ = f"of {runtime.name}"
        monkeypatch.setitem(sys.modules, runtime.package, module)
    found = versions()
    assert [found[each.package] for each in RUNTIMES] == [f"of {each.name}" for each in RUNTIMES]


def test_what_waits_for_a_run_may_listen_to_that_run_and_leaves_no_wrapper():
    worn: list[bool] = []

    def wrap():
        worn.append(True)
        return worn.pop

    listeners: Listeners[str] = Listeners(wrap)
    begun: list[object] = []

    def begins(model: object) -> None:
        begun.append(model)
        stop()
        listeners.add("recording")

    stop = listeners.wait(begins)
    assert worn
    assert listeners  # it waits
    assert list(listeners) == []
    assert list(listeners.at_run("model")) == ["recording"]
    assert list(listeners.at_run("model")) == ["recording"]
    assert begun == ["model"]
    assert worn
    listeners.remove("recording")
    assert not listeners
    assert not worn
