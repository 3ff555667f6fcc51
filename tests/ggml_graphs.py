"""Graphs of ggml itself, with operations that few models have, for `ld.dump` in place of a Llama's.

    PYTHONPATH=. .venv/llamacpp/bin/python tests/ggml_graphs.py tests/data/ggml.zip

It writes the run ``ggml``, with weights and without sources, and prints the names of all of ggml's
operations. A case is an operation on projections of the tokens' embeddings. Its name has the number
of a block, so its node is recorded in that block.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as api

import llmdebug_nb as ld
from llmdebug_nb.capture.compat.ggml_tensors import Library, Pointer, Tensor
from llmdebug_nb.capture.compat.llamacpp_api import BatchRow
from llmdebug_nb.capture.engines import llamacpp_steps

HIDDEN, WORDS, TOKENS, EXPERTS, HEADS, KEYS = 32, 20, [3, 1, 4], 6, 6, 8
F32, F16, Q8_0, I32 = 0, 1, 8, 26
MEMORY = 1 << 22  # for the structures of a graph; the values lie elsewhere
_C = {"t": ctypes.POINTER(Tensor), "i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float,
      "b": ctypes.c_bool, "p": ctypes.c_void_p, "z": ctypes.c_size_t, "s": ctypes.c_char_p,
      "": None}  # fmt: skip
# a function of ggml -> what it gives, and what it takes: see `_C`
_FUNCTIONS = {
    "init": "p:", "new_graph": "p:p", "build_forward_expand": ":pt", "set_name": "t:ts",
    "set_input": ":t", "backend_cpu_init": "p:", "backend_cpu_set_n_threads": ":pi",
    "backend_alloc_ctx_tensors": "p:pp", "backend_buffer_set_usage": ":pi",
    "backend_tensor_set": ":tpzz", "backend_sched_new": "p:ppizbb",
    "backend_sched_alloc_graph": "b:pp", "backend_sched_graph_compute": "i:pp",
    "backend_sched_reset": ":p", "backend_sched_set_eval_callback": ":ppp",
    "quantize_chunk": "z:ipplllp", "new_tensor_4d": "t:pillll",
    "soft_max_add_sinks": ":tt", "flash_attn_ext_add_sinks": ":tt", "rope_set_offset": "t:ti",
    # operations: of the context, then
    "get_rows": "t:ptt", "mul_mat": "t:ptt", "mul_mat_id": "t:pttt", "add_id": "t:pttt",
    "argsort": "t:pti", "argsort_top_k": "t:pti", "top_k": "t:pti", "cont": "t:pt",
    "soft_max_ext": "t:pttff", "reshape_4d": "t:ptllll", "permute": "t:ptiiii", "cast": "t:pti",
    "rope_ext": "t:ptttiiiffffff", "glu": "t:ptib", "glu_split": "t:ptti",
    "rope_multi": "t:ptttipiiffffff", "swiglu_oai": "t:pttff", "swiglu_clamp": "t:pttf",
    "flash_attn_ext": "t:pttttfff", "unary": "t:pti", "xielu": "t:ptffff", "scale": "t:ptf",
    "scale_bias": "t:ptff", "clamp": "t:ptff", "concat": "t:ptti", "leaky_relu": "t:ptfb",
    "group_norm": "t:ptif", "norm": "t:ptf", "l2_norm": "t:ptf", "cumsum": "t:pt", "sqr": "t:pt",
    "sqrt": "t:pt", "log": "t:pt", "sin": "t:pt", "cos": "t:pt", "sum": "t:pt", "mean": "t:pt",
    "sum_rows": "t:pt", "add": "t:ptt", "sub": "t:ptt", "mul": "t:ptt", "div": "t:ptt",
    "repeat_4d": "t:ptllll", "roll": "t:ptiiii",
}  # fmt: skip
UNARY = [
    "ABS", "SGN", "NEG", "STEP", "TANH", "ELU", "RELU", "SIGMOID", "GELU", "GELU_QUICK", "SILU",
    "HARDSWISH", "HARDSIGMOID", "EXP", "EXPM1", "SOFTPLUS", "GELU_ERF", "XIELU", "FLOOR", "CEIL",
    "ROUND", "TRUNC",
]  # fmt: skip
COUNTS = {"op": 101, "unary_op": 22, "glu_op": 7}  # of the enumerations in ggml.h
GLU = ["REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP"]
GATES = [name for name in GLU if name not in ("SWIGLU_OAI", "SWIGLU_CLAMP")]  # without a limit


class _Memory(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """ggml's functions, by their names without the ``ggml_``."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(api._lib._name, handle=api._lib._handle)
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, kinds in _FUNCTIONS.items():
            result, _, arguments = kinds.partition(":")
            function = getattr(self.library, f"ggml_{name}")
            function.restype, function.argtypes = _C[result], [_C[each] for each in arguments]
            self._functions[name] = function
        self._functions["init"].argtypes = [_Memory]  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._functions[name]

    def context(self) -> int:
        return int(self.init(_Memory(MEMORY, None, True)))


class Weight(NamedTuple):
    kind: int
    values: np.ndarray


class Build:
    """A graph that is made. Shapes are in ggml's order, the fastest axis first."""

    def __init__(self, ggml: Ggml, weights: dict[str, Pointer], tokens: Sequence[int]) -> None:
        self.ggml, self._weights, self.tokens = ggml, weights, len(tokens)
        self.context, self.inputs = ggml.context(), dict[str, tuple[Pointer, np.ndarray]]()
        self.graph = ggml.new_graph(self.context)
        ids = self.given("ids", np.array(tokens, np.int32))
        self.embedding = self.named("embd", self.op("get_rows", weights["token_embd.weight"], ids))
        self._made: dict[str, Pointer] = {}

    def op(self, name: str, *arguments: Any) -> Pointer:
        return getattr(self.ggml, name)(self.context, *arguments)

    def named(self, name: str, tensor: Pointer) -> Pointer:
        return self.ggml.set_name(tensor, name.encode())

    def given(self, name: str, values: np.ndarray) -> Pointer:
        """Return an input of the graph, the same tensor each time."""
        if name in self.inputs:
            return self.inputs[name][0]
        kind = {"float32": F32, "float16": F16, "int32": I32}[values.dtype.name]
        ne = (*values.shape[::-1], *(1,) * (4 - values.ndim))
        tensor = self.named(name, self.ggml.new_tensor_4d(self.context, kind, *ne))
        self.ggml.set_input(tensor)
        self.inputs[name] = tensor, np.ascontiguousarray(values)
        return tensor

    def weight(self, name: str) -> Pointer:
        return self._weights[f"{name}.weight"]

    def x(self, name: str) -> Pointer:
        """Return the tokens' projection by a weight, ``[n, tokens]``, the same tensor each time."""
        if name not in self._made:
            product = self.op("mul_mat", self.weight(name), self.embedding)
            self._made[name] = self.named(f"x_{name}", product)
        return self._made[name]

    def shaped(self, tensor: Pointer, *ne: int) -> Pointer:
        return self.op("reshape_4d", tensor, *ne, *(1,) * (4 - len(ne)))

    def heads(self, name: str = "wide", heads: int = HEADS) -> Pointer:
        """Return a projection in heads of 16 channels, ``[16, heads, tokens]``."""
        return self.shaped(self.x(name), 16, heads, self.tokens)

    def positions(self) -> Pointer:
        return self.given("positions", np.arange(self.tokens, dtype=np.int32) * 70 + 5)

    def scores(self) -> Pointer:
        """Return scores ``[keys, tokens, heads]``."""
        keys = self.shaped(self.x("scores"), KEYS, HEADS, self.tokens)
        return self.op("cont", self.op("permute", keys, 0, 2, 1, 3))

    def mask(self, dtype: type = np.float32) -> Pointer:
        """Return distances of keys, and what is hidden."""
        at = np.arange(KEYS) - KEYS + 1.0
        hidden = np.arange(KEYS) > KEYS - self.tokens + np.arange(self.tokens)[:, None]
        values = np.where(hidden, -np.inf, at).astype(dtype)
        return self.given(f"mask_{np.dtype(dtype).name}", values)

    def chosen(self, count: int = 2) -> Pointer:
        """Return experts of each token, by a view of what was sorted, as llama.cpp does."""
        return self.op("argsort_top_k", self.x("router"), count)


Case = Callable[[Build], Pointer]


def _rope(mode: int = 0, **changes: Any) -> Case:
    """``factors``: of frequencies, a weight. ``offset``: of the channels that turn."""

    def made(build: Build) -> Pointer:
        values: dict[str, Any] = {
            "n_dims": 16, "n_ctx_orig": 512, "freq_base": 10000.0, "freq_scale": 1.0,
            "ext_factor": 0.0, "attn_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        }  # fmt: skip
        values |= changes
        factors = build.weight("rope_factors") if values.pop("factors", False) else None
        offset, count = values.pop("offset", 0), values.pop("n_dims")
        turned = build.op(
            "rope_ext", build.heads(), build.positions(), factors, count, mode, *values.values()
        )
        return build.ggml.rope_set_offset(turned, offset) if offset else turned

    return made


def _rope_in_sections(build: Build) -> Pointer:
    sections, at = (ctypes.c_int * 4)(4, 2, 2, 0), np.arange(4 * build.tokens, dtype=np.int32)
    return build.op(
        "rope_multi", build.heads(), build.given("places", at), None, 16, sections, 8, 512,
        10000.0, 1.0, 0.0, 1.0, 32.0, 1.0,
    )  # fmt: skip


def _soft_max(mask: type | None = None, bias: float = 0.0, sinks: bool = False) -> Case:
    def made(build: Build) -> Pointer:
        over = build.mask(mask) if mask is not None else None
        shares = build.op("soft_max_ext", build.scores(), over, 0.7, bias)
        if sinks:
            build.ggml.soft_max_add_sinks(shares, build.weight("sinks"))
        return shares

    return made


def _flash(kind: int = F16, bias: float = 0.0, cap: float = 0.0, sinks: bool = False) -> Case:
    """Attention of all tokens to all, two queries to one key."""

    def made(build: Build) -> Pointer:
        def turned(name: str, heads: int) -> Pointer:
            made = build.shaped(build.x(name), HIDDEN, heads, build.tokens)
            return build.op("permute", made, 0, 2, 1, 3)

        q, k, v = turned("queries", HEADS), turned("keys", 3), turned("values", 3)
        k, v = (build.op("cast", build.op("cont", each), kind) for each in (k, v))
        at = np.arange(build.tokens)
        mask = np.where(at > at[:, None], -np.inf, at - at[:, None]).astype(np.float16)
        mixed = build.op("flash_attn_ext", q, k, v, build.given("causal", mask), 0.5, bias, cap)
        if sinks:
            build.ggml.flash_attn_ext_add_sinks(mixed, build.weight("sinks"))
        return mixed

    return made


def _experts(weight: str, each: bool = False, count: int = 2) -> Case:
    """Products with ``count`` chosen experts. ``each``: two take rows of their own in turn."""

    def made(build: Build) -> Pointer:
        rows = build.shaped(build.embedding, HIDDEN, 1, build.tokens)
        if each:
            rows = build.shaped(build.x("pairs"), HIDDEN, 2, build.tokens)
        return build.op("mul_mat_id", build.weight(weight), rows, build.chosen(count))

    return made


def _add_id(build: Build) -> Pointer:
    rows = build.shaped(build.x("pairs"), HIDDEN, 2, build.tokens)
    return build.op("add_id", rows, build.weight("expert_bias"), build.chosen())


def _glu(name: str, swapped: bool = False, values: str = "wide") -> Case:
    return lambda build: build.op("glu", build.x(values), GLU.index(name), swapped)


def _split(name: str) -> Case:
    return lambda build: build.op("glu_split", build.x("gate"), build.x("up"), GLU.index(name))


def _soft_cap(build: Build) -> Pointer:
    capped = build.op("unary", build.op("scale", build.x("wide"), 0.2), UNARY.index("TANH"))
    return build.op("scale", capped, 5.0)


def _unary(name: str, values: str = "wide") -> Case:
    return lambda build: build.op("unary", build.x(values), UNARY.index(name))


def _plain(name: str, *arguments: Any) -> Case:
    return lambda build: build.op(name, build.x("wide"), *arguments)


def _positive(name: str) -> Case:
    return lambda build: build.op(name, build.op("sqr", build.x("wide")))


def _negative(name: str) -> Case:
    def made(build: Build) -> Pointer:
        below = build.op("scale_bias", build.x("gate"), 0.5, -6.0)  # far below 0
        return build.op("unary", below, UNARY.index(name))

    return made


def _both(name: str, *arguments: Any) -> Case:
    return lambda build: build.op(name, build.x("gate"), build.x("up"), *arguments)


YARN = {"freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 0.9}
CASES: dict[str, Case] = {
    "mul_mat_id": _experts("experts"),
    "mul_mat_id_each": _experts("experts", each=True),
    "mul_mat_id_in_turn": _experts("experts", each=True, count=4),
    "mul_mat_id_q8_0": _experts("experts_q8_0"),
    "mul_mat_id_f16": _experts("experts_f16", each=True),
    "add_id": _add_id,
    "argsort": lambda build: build.op("argsort", build.x("router"), 0),
    "argsort_falling": lambda build: build.op("argsort", build.x("router"), 1),
    "argsort_view": Build.chosen,
    "top_k_equal": lambda build: build.op("top_k", build.x("equal"), 3),
    "argsort_equal": lambda build: build.op("argsort", build.x("equal"), 1),
    "top_k": lambda build: build.op("top_k", build.x("router"), 3),
    "soft_max": _soft_max(),
    "soft_max_mask": _soft_max(np.float32),
    "soft_max_mask_f16": _soft_max(np.float16),
    "soft_max_alibi": _soft_max(np.float32, bias=8.0),
    "soft_max_sinks": _soft_max(np.float32, sinks=True),
    "soft_max_alibi_sinks": _soft_max(np.float16, bias=4.0, sinks=True),
    "rope": _rope(),
    "rope_halves": _rope(2),
    "rope_partial": _rope(2, n_dims=8),
    "rope_scaled": _rope(freq_scale=0.25),
    "rope_yarn": _rope(**YARN),
    "rope_yarn_halves": _rope(2, **YARN, beta_fast=16.0, beta_slow=2.0, n_ctx_orig=4096),
    "rope_yarn_part": _rope(2, **{**YARN, "ext_factor": 0.5}),
    "rope_factors": _rope(2, factors=True),
    "rope_factors_yarn": _rope(factors=True, **YARN),
    "rope_offset": _rope(2, n_dims=8, offset=4),
    "rope_sections": _rope_in_sections,
    **{f"{name.lower()}_one": _glu(name) for name in GATES},
    **{f"{name.lower()}_swapped": _glu(name, True) for name in ("REGLU", "GEGLU", "SWIGLU")},
    **{f"{name.lower()}_two": _split(name) for name in GATES},
    **{f"{name.lower()}_large": _glu(name, values="large") for name in GATES},
    "swiglu_oai": _both("swiglu_oai", 1.702, 1.5),
    "swiglu_clamp": _both("swiglu_clamp", 1.5),
    "flash": _flash(),
    "flash_f32": _flash(F32),
    "flash_q8_0": _flash(Q8_0),
    "flash_alibi": _flash(bias=8.0),
    "flash_cap": _flash(cap=2.0),
    "flash_sinks": _flash(sinks=True),
    "flash_all": _flash(F32, bias=8.0, cap=2.0, sinks=True),
    "soft_cap": _soft_cap,
    **{f"unary_{name.lower()}": _unary(name) for name in UNARY if name != "XIELU"},
    **{
        f"unary_{name.lower()}_{size}": _unary(name, size)
        for size in ("small", "large")
        for name in UNARY
        if name != "XIELU" and (name, size) != ("EXP", "large")
    },
    **{
        f"unary_{name.lower()}_negative": _negative(name)
        for name in ("SOFTPLUS", "GELU_ERF", "SILU", "ELU", "SIGMOID", "GELU", "GELU_QUICK", "EXP")
    },
    "xielu_small": lambda build: build.op("xielu", build.x("small"), 0.8, 0.6, 0.5, -1e-6),
    "xielu": _plain("xielu", 0.8, 0.6, 0.5, -1e-6),
    "scale": _plain("scale", 1.7),
    "scale_bias": _plain("scale_bias", 1.7, -0.4),
    "clamp": _plain("clamp", -0.5, 0.8),
    "leaky_relu": _plain("leaky_relu", 0.1, False),
    "norm": _plain("norm", 1e-3),
    "l2_norm": _plain("l2_norm", 1e-3),
    "group_norm": lambda build: build.op("group_norm", build.scores(), 4, 1e-3),
    "sqr": _plain("sqr"), "sin": _plain("sin"), "cos": _plain("cos"), "sum": _plain("sum"),
    "mean": _plain("mean"), "sum_rows": _plain("sum_rows"), "cumsum": _plain("cumsum"),
    "roll": _plain("roll", 1, 0, 0, 0), "repeat": _plain("repeat_4d", 96, 6, 2, 1),
    "sqrt": _positive("sqrt"), "log": _positive("log"),
    **{name: _both(name) for name in ("add", "sub", "mul", "div")},
    "concat": _both("concat", 0), "concat_rows": _both("concat", 1),
    "concat_last": _both("concat", 2),
}  # fmt: skip


def _drawn() -> dict[str, Weight]:
    draws = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (draws.standard_normal(shape) * scale).astype(np.float32)

    width, projected = HIDDEN**-0.5, {
        "wide": 96, "gate": 32, "up": 32, "router": EXPERTS, "pairs": 2 * HIDDEN, "keys": 96,
        "scores": KEYS * HEADS, "queries": HIDDEN * HEADS, "values": 96, "small": 32, "large": 32,
    }  # fmt: skip
    experts = normal(EXPERTS, HIDDEN, HIDDEN, scale=width)
    found = {"token_embd": Weight(F32, normal(WORDS, HIDDEN))}
    # spread wide enough that clamps, caps and branches are met
    found |= {
        name: Weight(F32, normal(n, HIDDEN, scale=2 * width)) for name, n in projected.items()
    }
    for name, size in (("small", 1e-3), ("large", 8.0)):
        found[name] = Weight(F32, found[name].values * np.float32(size))
    found["equal"] = Weight(F32, np.repeat(found["router"].values[:2], [4, 2], axis=0))
    found["experts"] = Weight(F32, experts)
    found["experts_f16"] = Weight(F16, experts)
    found["experts_q8_0"] = Weight(Q8_0, experts)
    found["expert_bias"] = Weight(F32, normal(EXPERTS, HIDDEN))
    found["sinks"] = Weight(F32, normal(HEADS))
    found["rope_factors"] = Weight(F32, np.linspace(1, 6, 8, dtype=np.float32))
    return {f"{name}.weight": weight for name, weight in found.items()}


class Operations:
    """Stands for a ``llama_cpp.Llama``: its graph has each of the cases."""

    model_path = "nowhere.gguf"
    n_tokens = 0

    def __init__(self, cases: dict[str, Case]) -> None:
        self.ggml, self.cases = Ggml(), cases
        self.on_node: Callable[[int, bool], bool] = lambda address, ask: False
        self.around: Callable[..., None] | None = None
        self._weights = self._loaded()
        self._kept: list[Build] = []
        self._cpu = self.ggml.backend_cpu_init()
        self.ggml.backend_cpu_set_n_threads(self._cpu, 1)
        self._scheduler = self.ggml.backend_sched_new(
            (ctypes.c_void_p * 1)(self._cpu), None, 1, 4096, False, False
        )
        kind = api.ggml_backend_sched_eval_callback

        def call(address: int | None, ask: bool, _: object) -> bool:
            return self.on_node(address or 0, ask)

        self._callback = kind(call)
        self.ggml.backend_sched_set_eval_callback(
            self._scheduler, ctypes.cast(self._callback, ctypes.c_void_p), None
        )

    def _loaded(self) -> dict[str, Pointer]:
        context, made, drawn = self.ggml.context(), {}, _drawn()
        for name, weight in drawn.items():
            ne = (*weight.values.shape[::-1], *(1,) * (4 - weight.values.ndim))
            tensor = self.ggml.new_tensor_4d(context, weight.kind, *ne)
            made[name] = self.ggml.set_name(tensor, name.encode())
        cpu = self.ggml.backend_cpu_init()
        buffer = self.ggml.backend_alloc_ctx_tensors(context, cpu)
        self.ggml.backend_buffer_set_usage(buffer, 1)
        for name, weight in drawn.items():
            self._set(made[name], self._stored(weight))
        return made

    def _stored(self, weight: Weight) -> np.ndarray:
        if weight.kind != Q8_0:
            return weight.values.astype({F32: np.float32, F16: np.float16}[weight.kind])
        rows, columns = weight.values.size // weight.values.shape[-1], weight.values.shape[-1]
        out = np.zeros(rows * columns // 32 * 34, np.uint8)
        self.ggml.quantize_chunk(
            Q8_0, weight.values.ctypes.data, out.ctypes.data, 0, rows, columns, None
        )
        return out

    def _set(self, tensor: Pointer, values: np.ndarray) -> None:
        self.ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def run(self, tokens: Sequence[int]) -> None:
        build = Build(self.ggml, self._weights, tokens)
        self._kept.append(build)  # addresses are not used again
        self.ggml.build_forward_expand(build.graph, build.embedding)
        for number, (name, case) in enumerate(self.cases.items()):
            result = build.named(f"{name}-{number}", case(build))
            self.ggml.build_forward_expand(build.graph, result)
        self.ggml.backend_sched_reset(self._scheduler)
        assert self.ggml.backend_sched_alloc_graph(self._scheduler, build.graph)
        for tensor, values in build.inputs.values():
            if tensor.contents.data:  # no operation reads the others
                self._set(tensor, values)
        assert not self.ggml.backend_sched_graph_compute(self._scheduler, build.graph)

    def eval(self, tokens: list[int]) -> None:
        start, self.n_tokens = self.n_tokens, self.n_tokens + len(tokens)
        rows = [BatchRow(token, start + at, 0) for at, token in enumerate(tokens)]
        if self.around is None:
            self.run(tokens)
        else:
            self.around(lambda: self.run(tokens), rows)


class Context:
    """Stands for the second context of a ``Llama``; its library reads ggml's tensors."""

    architecture, unified, cache_types = "operations", True, {"f32"}

    def __init__(self, llama: Operations, on_node: Callable[[int, bool], bool]) -> None:
        self._llama, llama.on_node = llama, on_node
        self.library = Library(llama.ggml.library, "of the test")

    def probe(self) -> None:
        self._llama.run([0])

    def put_in(self, around: Callable[..., None]) -> None:
        self._llama.around = around

    def take_out(self) -> None:
        self._llama.around, self._llama.on_node = None, lambda address, ask: False

    def free(self) -> None: ...


def recorded(folder: Path, cases: dict[str, Case] | None = None) -> ld.Run:
    """Record each case on the same tokens, and then on one alone."""
    llama_cpp.Llama, llamacpp_steps.Context = Operations, Context  # type: ignore[misc, assignment]
    engine = Operations(CASES if cases is None else cases)
    with ld.dump(
        engine, name="ggml", path=folder, tokens="all", weights=True, sources=False
    ) as run:
        engine.eval(TOKENS)
        engine.eval(TOKENS[:1])
    return run


def operations() -> list[str]:
    """Return the names of all operations of this release, as `Library.op` gives them."""
    library = Ggml().library
    found = []
    for kind, groups in (("op", ("UNARY", "GLU")), ("unary_op", ()), ("glu_op", ())):
        name = getattr(library, f"ggml_{kind}_name")
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        names = (name(number).decode() for number in range(COUNTS[kind]))
        found += [each for each in names if each not in groups]
    return found


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorded(Path(folder))
        with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as packed:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    packed.write(path, path.relative_to(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print(*operations())
