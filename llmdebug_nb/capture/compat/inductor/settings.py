"""Inductor's version, settings and fusions: checks whether kernels can be observed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from llmdebug_nb.capture.compiled.fusion_switches import FusionSwitch

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode as Node
    from torch._inductor.scheduler import Scheduler


def trouble() -> str | None:
    """Return why kernels can't be observed in this version of PyTorch, or None if they can."""
    try:
        from torch._inductor import config
        from torch._inductor.choices import InductorChoices
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.codegen.simd import SIMDScheduling
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: F401
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import ExternKernelSchedulerNode
        from torch._inductor.virtualized import V
    except ImportError as error:
        return f"PyTorch {torch.__version__} has no {error.name or error}"
    needed: tuple[tuple[object, tuple[str, ...]], ...] = (
        (CppScheduling, ("flush", "codegen_template")),
        (SIMDScheduling, ("_launch_kernel_and_cleanup",)),
        (PythonWrapperCodegen, ("generate_kernel_call", "write_header")),
        (ExternKernelSchedulerNode, ("codegen",)),
        (GraphLowering, ("run_node", "codegen")),
        (InductorChoices, ("can_fuse_vertical",)),
        (V, ("set_choices_handler",)),
        (config, ("post_grad_custom_post_pass", "fx_graph_cache")),
    )
    for home, names in needed:
        for name in names:
            if not hasattr(home, name):
                where = getattr(home, "__name__", "V")
                return f"PyTorch {torch.__version__} has no {where}.{name}"
    return None


def no_compiler() -> str | None:
    """Return why code for the CPU can't be compiled, or None if there is a compiler."""
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError) as error:
        return str(error).partition("\n")[0]
    return None


def settings() -> list[str]:
    """Return the names of the settings in Inductor's configuration."""
    from torch._inductor import config

    return list(config._config)  # type: ignore[attr-defined]  # added when the module is imported


def check_config(config: Iterable[str]) -> None:
    """Raise KeyError with the first name that is not a setting of Inductor."""
    known = set(settings())
    for name in config:
        if name not in known:
            raise KeyError(name)


@contextlib.contextmanager
def restricted_fusion(switch: FusionSwitch) -> Iterator[None]:
    """Allow only the fusions that ``switch`` leaves on."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    if switch.allows_all:
        yield
        return

    class Choices(InductorChoices):
        @staticmethod
        def can_fuse(
            scheduler: Scheduler, node1: Node, node2: Node, shared_data_score: int
        ) -> bool:
            if switch.apart & (_operators(node1) | _operators(node2)):
                return False
            return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

        @staticmethod
        def can_fuse_vertical(
            scheduler: Scheduler, node1: Node, node2: Node, shared_data_score: int
        ) -> bool:
            allowed = InductorChoices.can_fuse_vertical
            return switch.vertical and allowed(scheduler, node1, node2, shared_data_score)

        @staticmethod
        def can_fuse_horizontal(
            scheduler: Scheduler, node1: Node, node2: Node, shared_data_score: int
        ) -> bool:
            allowed = InductorChoices.can_fuse_horizontal
            return switch.horizontal and allowed(scheduler, node1, node2, shared_data_score)

    with V.set_choices_handler(Choices()):
        yield


def _operators(node: Node) -> set[str]:
    """Return the operators of a scheduled node: ``aten.rsqrt.default`` and ``aten.rsqrt``."""
    operations = [leaf.node for leaf in node.get_nodes() if leaf.node is not None]
    names = {str(origin.target) for one in operations for origin in one.get_origins()}
    return names | {name.rpartition(".")[0] for name in names}
