"""The only home of Inductor's internals: recording the buffers of compiled kernels.

Inductor turns a graph into a Python function that calls kernels on buffers. While one of our graphs
is compiled, a line is added before and after each kernel call; it passes the kernel's buffers to a
`KernelObserver`. Everything else is unchanged, so the kernels and their results are the same. Code
compiled this way never enters Inductor's caches.
"""

from llmdebug_nb.capture.compat.inductor.compiling import compile_traced
from llmdebug_nb.capture.compat.inductor.kernel_calls import (
    Buffer,
    CompiledFunction,
    GraphInput,
    KernelObserver,
    Launch,
)
from llmdebug_nb.capture.compat.inductor.settings import (
    check_config,
    no_compiler,
    settings,
    trouble,
)

__all__ = (
    "Buffer",
    "CompiledFunction",
    "GraphInput",
    "KernelObserver",
    "Launch",
    "check_config",
    "compile_traced",
    "no_compiler",
    "settings",
    "trouble",
)
