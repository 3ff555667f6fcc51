"""Runs at the start of every Python of a launched program, before the program: of the standard library alone, and quick.

Runs the program's own sitecustomize, then waits for an import of torch or onnxruntime.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # llmdebug_nb/


def _chain() -> None:
    """Run the sitecustomize that this one hides."""
    places = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _AfterImport:
    """Calls ``begin(name)`` of `llmdebug_nb.app.launching.child` right after the first import of a package."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = set(names)

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        from importlib.util import find_spec

        self.names.discard(fullname)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _begin(fullname)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _provide() -> None:
    """Have `import llmdebug_nb` give what the program was launched by, whatever this Python has installed."""
    from importlib.util import module_from_spec, spec_from_file_location

    if "llmdebug_nb" not in sys.modules:
        init = os.path.join(_PACKAGE, "__init__.py")
        spec = spec_from_file_location("llmdebug_nb", init, submodule_search_locations=[_PACKAGE])
        if spec is not None and spec.loader is not None:
            module = sys.modules["llmdebug_nb"] = module_from_spec(spec)
            spec.loader.exec_module(module)


def _begin(name: str) -> None:
    try:
        _provide()
        from llmdebug_nb.app.launching import child

        child.begin(name)
    except Exception as error:
        sys.stderr.write(
            f"llmdebug: this Python ({sys.executable}) can't record: {type(error).__name__}: {error}\n"
        )


# once in a process: a .pth file may have run it before
if os.environ.get("LLMDEBUG_LAUNCH") and not any(
    type(each).__name__ == "_AfterImport" for each in sys.meta_path
):
    sys.meta_path.insert(0, _AfterImport(("torch", "onnxruntime")))
if __name__ == "sitecustomize":
    _chain()
