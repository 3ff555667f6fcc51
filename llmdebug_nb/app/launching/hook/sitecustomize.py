"""Runs at the start of every Python of a launched program; imports only the standard library.

First it runs the program's own sitecustomize, which it hides. Then it waits until the program
imports torch or the package of a runtime: those that the launcher names. In a Python that outlives
the launcher it takes what the launcher put into the environment out of it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))  # llmdebug_nb/


def _run_hidden_sitecustomize() -> None:
    """Run the program's own sitecustomize, which this file hides."""
    places = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _AfterImport:
    """A finder that calls `child.begin(name)` right after the first import of a package.

    A program may look for the package (`importlib.util.find_spec`) any number of times before the
    import. Only the execution of the module counts.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)  # packages that were not imported yet

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        spec = self._find(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                if fullname in self.names:
                    self.names.discard(fullname)
                    _begin(fullname)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _find(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the other finders."""
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None


def _provide_package() -> None:
    """Let `import llmdebug_nb` import the launcher's package, even if another one is installed."""
    from importlib.util import module_from_spec, spec_from_file_location

    if "llmdebug_nb" not in sys.modules:
        init = os.path.join(_PACKAGE, "__init__.py")
        spec = spec_from_file_location("llmdebug_nb", init, submodule_search_locations=[_PACKAGE])
        if spec is not None and spec.loader is not None:
            module = sys.modules["llmdebug_nb"] = module_from_spec(spec)
            spec.loader.exec_module(module)


def _is_over(launch: str) -> bool:
    return not os.path.isfile(os.path.join(launch, "options.json"))


def _packages(launch: str) -> list[str]:
    """Return the packages that the launcher names."""
    try:
        with open(os.path.join(launch, "packages"), encoding="utf-8") as file:
            return file.read().split()
    except OSError:  # the launcher ends just now
        return []


def _leave(launch: str) -> None:
    """Take all that the launcher has put into the environment out of it, for this process's own."""
    os.environ.pop("LLMDEBUG_LAUNCH", None)
    for name, own in (("PATH", os.path.join(launch, "bin")), ("PYTHONPATH", _HERE)):
        places = os.environ.get(name, "").split(os.pathsep)
        kept = [place for place in places if os.path.abspath(place or ".") != own]
        if any(kept):
            os.environ[name] = os.pathsep.join(kept)
        elif kept != places:
            os.environ.pop(name, None)


def _begin(name: str) -> None:
    launch = os.environ.get("LLMDEBUG_LAUNCH")
    if launch and _is_over(launch):
        _leave(launch)
        return
    try:
        _provide_package()
        from llmdebug_nb.app.launching import child

        child.begin(name)
    except Exception as error:
        sys.stderr.write(
            f"llmdebug: this Python ({sys.executable}) can't record:"
            f" {type(error).__name__}: {error}\n"
        )


_launch = os.environ.get("LLMDEBUG_LAUNCH")
if _launch and _is_over(_launch):
    _leave(_launch)
# once per process: a .pth file may have run this already
elif _launch and not any(type(each).__name__ == "_AfterImport" for each in sys.meta_path):
    sys.meta_path.insert(0, _AfterImport(_packages(_launch)))  # type: ignore[arg-type]
if __name__ == "sitecustomize":
    _run_hidden_sitecustomize()
