"""Run the Triton kernels that Inductor writes in Triton's interpreter, on CPU tensors.


Triton reads TRITON_INTERPRET as it is imported, so this is for processes of their own.
"""

from __future__ import annotations

import linecache
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

BLOCK = 32  # elements of each axis in a block


class _LibDevice:
    """CUDA's math functions, which the interpreter lacks: Triton's own, else NumPy's."""

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        own, theirs = getattr(tl.math, name, None), getattr(np, name, None)
        return own or (
            lambda x: tl.core.tensor(TensorHandle(theirs(x.handle.data), x.handle.dtype), x.type)
        )


class _Kernel:
    """A kernel, as the code around it calls it."""

    def __init__(self, name: str, source: str) -> None:
        from torch._inductor.runtime import triton_helpers

        def heuristic(*_: Any, triton_meta: dict[str, Any], **__: Any) -> Callable[[Any], Any]:
            self.signature = triton_meta["signature"]
            return lambda function: function

        names = ("pointwise", "reduction", "persistent_reduction")
        space = {
            "triton_heuristics": SimpleNamespace(**dict.fromkeys(names, heuristic)),
            "triton_helpers": triton_helpers,
            "libdevice": _LibDevice(),
            "tl_math": tl.math,
            "__file__": name,
        }
        ours = ("import triton_helpers, triton_heuristics", "import libdevice", "set_driver_to")
        lines = [line for line in source.splitlines() if not any(text in line for text in ours)]
        file = f"<{name}>"  # where the interpreter looks for the code
        linecache.cache[file] = (len(source), None, [line + "\n" for line in lines], file)
        exec(compile("\n".join(lines), file, "exec"), space)
        self.function: Any = space[name]

    def run(self, *args: Any, stream: Any = None) -> None:
        blocks = {name: BLOCK for name in self.signature if name.endswith("BLOCK")}
        given = dict(
            zip((name for name in self.signature if name not in blocks), args, strict=True)
        )
        grid = [
            math.ceil(given.get(f"{axis}numel", 1) / blocks.get(f"{axis.upper()}BLOCK", 1))
            for axis in "xyz"
        ]
        self.function[tuple(grid)](**given, **blocks)


@contextmanager
def interpreted(changed: Callable[[str], str] = str) -> Iterator[None]:
    """Let Inductor write Triton kernels for the CPU; ``changed(source)`` may edit a kernel."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch.utils import _triton

    def kernel(_: Any, name: str, source: str, device_str: str = "") -> _Kernel:
        return _Kernel(name, changed(source))

    with (
        config.patch(cpu_backend="triton", compile_threads=1, fx_graph_cache=False),
        mock.patch.object(_triton, "triton_hash_with_backend", return_value="interpreter"),
        mock.patch.object(AsyncCompile, "triton", kernel),
    ):
        yield
