"""A small engine in place of llama.cpp: one layer, whose graph is real ``ggml_tensor`` structures.

It computes in NumPy, in float32 and with whole numbers in blocks, as ggml's reference does. A fault
is planted by `Fake.spoil`, which changes the values of a node as it is computed.
"""

from __future__ import annotations

import ctypes
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from llmdebug_nb.capture.compat.ggml_tensors import Tensor, strided
from llmdebug_nb.capture.compat.llamacpp_api import BatchRow
from llmdebug_nb.capture.engines import llamacpp_steps

Array = np.ndarray
F32, F16, Q8_0, I32 = 0, 1, 8, 26
NAMES = {F32: "f32", F16: "f16", Q8_0: "q8_0", I32: "i32"}
DTYPES = {F32: np.float32, F16: np.float16, I32: np.int32}
HIDDEN, HEADS, WIDTH, INNER, WORDS, CELLS = 64, 2, 32, 96, 50, 16
BLOCK, BLOCK_BYTES = 32, 34


@dataclass
class Made:
    """A tensor, what holds its bytes, and the operation that makes it."""

    tensor: Tensor
    data: Array
    op: str = "NONE"

    @property
    def address(self) -> int:
        return ctypes.addressof(self.tensor)

    @property
    def values(self) -> Array:
        """The values where they lie, ``[ne3, ne2, ne1, ne0]``."""
        shape, steps = tuple(self.tensor.ne)[::-1], tuple(self.tensor.nb)[::-1]
        whole = np.frombuffer(self.data, DTYPES[self.tensor.type])
        whole = whole[(self.tensor.data - self.data.ctypes.data) // whole.itemsize :]
        return np.lib.stride_tricks.as_strided(whole, shape, steps)


@dataclass
class Library:
    """Answers what ggml's functions would, of the tensors of a fake."""

    known: dict[int, Made] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)
    devices: dict[int, str] = field(default_factory=dict)

    def op(self, tensor: Tensor) -> str:
        return self.known[ctypes.addressof(tensor)].op

    def type_name(self, number: int) -> str:
        return NAMES[number]

    def is_weight(self, tensor: Tensor) -> bool:
        return ctypes.addressof(tensor) in self.weights

    def device(self, tensor: Tensor) -> str:
        return self.devices.get(ctypes.addressof(tensor), "")

    def values(self, tensor: Tensor) -> torch.Tensor:
        made = self.known[ctypes.addressof(tensor)]
        start = (tensor.data or 0) - made.data.ctypes.data
        shape, steps = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
        return strided(made.data[start:].copy(), tensor.type, shape, steps)

    def rows(self, tensor: Tensor, width: int) -> Array:
        made = self.known[ctypes.addressof(tensor)]
        return made.data.reshape(*tuple(tensor.ne)[:0:-1], width)


class Fake:
    """Stands for ``llama_cpp.Llama``. ``kind``: of the matrices. ``spoil``: node's name -> change.

    ``settings``: parameters that the computation takes in place of those that the graph tells.
    ``last_product``: what was multiplied last.
    """

    model_path = "nowhere.gguf"
    n_tokens = 0

    def __init__(self, kind: int = F32, neox: bool = False) -> None:
        self.library, self.kind, self.neox = Library(), kind, neox
        self.spoil: dict[str, Callable[[Array], Array]] = {}
        self.settings: dict[str, float] = {}
        self.last_product = np.zeros(0)
        self.around: Callable[..., None] | None = None
        self.on_node: Callable[[int, bool], bool] = lambda address, ask: False
        self._draws = np.random.default_rng(0)
        self._weights: dict[str, Made] = {}
        sizes = {
            "token_embd": (WORDS, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN),
            "blk.0.attn_k": (HIDDEN, HIDDEN), "blk.0.attn_v": (HIDDEN, HIDDEN),
            "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (INNER, HIDDEN),
            "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
            "output": (WORDS, HIDDEN),
        }  # fmt: skip
        for name, (rows, columns) in sizes.items():
            scale = 1.0 if name == "token_embd" else columns**-0.5
            values = self._draws.standard_normal((rows, columns)) * scale
            self._weight(f"{name}.weight", values.astype(np.float32), kind)
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            values = 1 + 0.2 * self._draws.standard_normal((1, HIDDEN))
            self._weight(f"{name}.weight", values.astype(np.float32), F32, 1)
        self._cache = [self._leaf(f"cache_{x}_l0", F32, (HIDDEN, CELLS)) for x in "kv"]
        self._kept: list[Made] = []

    # -- tensors ----------------------------------------------------------------------------------

    def _leaf(self, name: str, kind: int, ne: tuple[int, ...], data: Array | None = None) -> Made:
        ne = (*ne, *(1,) * (4 - len(ne)))
        if kind == Q8_0:
            sizes = [BLOCK_BYTES, ne[0] // BLOCK * BLOCK_BYTES]
        else:
            sizes = [np.dtype(DTYPES[kind]).itemsize]
            sizes.append(sizes[0] * ne[0])
        for n in ne[1:3]:
            sizes.append(sizes[-1] * n)
        held = np.zeros(sizes[-1] * ne[3], np.uint8) if data is None else data
        tensor = Tensor(type=kind, name=name.encode())
        tensor.ne[:], tensor.nb[:], tensor.data = ne, sizes, held.ctypes.data
        made = Made(tensor, held)
        self.library.known[made.address] = made
        return made

    def _weight(self, name: str, values: Array, kind: int, axes: int = 2) -> None:
        data = quantised(values) if kind == Q8_0 else values.astype(DTYPES[kind])
        raw = np.ascontiguousarray(data).view(np.uint8).ravel()
        self._weights[name] = made = self._leaf(name, kind, values.shape[::-1][:axes], raw)
        self.library.weights.add(made.address)

    def dequantised(self, name: str) -> Array:
        """Return a weight's values, float32."""
        made = self._weights[name]
        if self.kind != Q8_0 or made.tensor.type != Q8_0:
            return made.values.astype(np.float32)
        codes, scales = blocks_of(made.data)
        return (codes * scales[:, None]).astype(np.float32).reshape(tuple(made.tensor.ne)[::-1])

    def _node(
        self, op: str, name: str, sources: list[Made], ne: tuple[int, ...],
        values: Callable[[], Array], params: Any = (), kind: int = F32,
    ) -> Made:  # fmt: skip
        """Add a node to the graph; it is computed when its turn comes."""
        made = self._leaf(name, kind, ne)
        made.op = op
        for slot, source in enumerate(sources):
            made.tensor.src[slot] = ctypes.pointer(source.tensor)
        for place, value in enumerate(params):
            bits = np.float32(value).view(np.int32) if isinstance(value, float) else value
            made.tensor.op_params[place] = int(bits)
        self._graph.append((made, values))
        return made

    def _view(
        self, op: str, of: Made, ne: tuple[int, ...], nb: tuple[int, ...] | None = None,
        params: Any = (), offset: int = 0,
    ) -> Made:  # fmt: skip
        made = self._leaf(f"{bytes(of.tensor.name).decode()} (view)", of.tensor.type, ne, of.data)
        made.op, made.tensor.data = op, of.tensor.data + offset
        if nb is not None:
            made.tensor.nb[:] = nb
        made.tensor.src[0] = ctypes.pointer(of.tensor)
        made.tensor.view_src = of.tensor.view_src or ctypes.pointer(of.tensor)
        made.tensor.op_params[: len(params)] = params
        self._graph.append((made, None))
        return made

    # -- the graph --------------------------------------------------------------------------------

    def _layer(self, tokens: list[int], start: int) -> None:
        count, w = len(tokens), self._weights
        ids = self._leaf("inp_tokens", I32, (count,), np.array(tokens, np.int32).view(np.uint8))
        at = np.arange(start, start + count, dtype=np.int32)
        places = self._leaf("inp_pos", I32, (count,), at.view(np.uint8))
        hidden = np.where(np.arange(CELLS) <= at[:, None], 0, -np.inf).astype(np.float32)
        mask = self._leaf("mask", F32, (CELLS, count), hidden.view(np.uint8).ravel())
        table = self.dequantised("token_embd.weight").reshape(WORDS, HIDDEN)
        x = self._node("GET_ROWS", "embd", [w["token_embd.weight"], ids], (HIDDEN, count),
                       lambda: table[tokens])  # fmt: skip
        q, k, v = (
            self._product(f"blk.0.attn_{each}.weight", f"{each.upper()}cur-0", normed)
            for normed in [self._norm(x, "blk.0.attn_norm.weight", "attn_norm-0")]
            for each in "qkv"
        )
        q, k = self._rope(q, places), self._rope(k, places)
        for cache, new in zip(self._cache, (k, v), strict=True):
            self._store(cache, new, at)
        heads = self._attention(q, mask, count)
        out = self._product("blk.0.attn_output.weight", "attn_out-0", heads)
        x = self._added("ffn_inp-0", out, x)
        normed = self._norm(x, "blk.0.ffn_norm.weight", "ffn_norm-0")
        gate = self._product("blk.0.ffn_gate.weight", "ffn_gate-0", normed)
        up = self._product("blk.0.ffn_up.weight", "ffn_up-0", normed)
        gated = self._node(
            "SWIGLU", "ffn_swiglu-0", [gate, up], (INNER, count),
            lambda: gate.values / (1 + np.exp(-gate.values)) * up.values, (2, 0),
        )  # fmt: skip
        down = self._product("blk.0.ffn_down.weight", "ffn_out-0", gated)
        x = self._added("l_out-0", down, x)
        last = self._norm(x, "output_norm.weight", "result_norm")
        self._product("output.weight", "result_output", last)

    def _norm(self, x: Made, weight: str, name: str) -> Made:
        eps, ne, by = 1e-5, tuple(x.tensor.ne), self._weights[weight]

        def normed() -> Array:
            own = self.settings.get("eps", eps)
            return x.values / np.sqrt((x.values**2).mean(-1, keepdims=True) + np.float32(own))

        plain = self._node("RMS_NORM", name.replace("attn_", ""), [x], ne, normed, (eps,))
        return self._node("MUL", name, [plain, by], ne, lambda: plain.values * by.values)

    def _product(self, weight: str, name: str, x: Made) -> Made:
        table = self._weights[weight]
        ne = (table.tensor.ne[1], *tuple(x.tensor.ne)[1:])

        def multiplied() -> Array:
            self.last_product = x.values
            if self.kind == Q8_0:
                return product_of_blocks(table.data, x.values).reshape(ne[::-1])
            rounded = x.values.astype(DTYPES[self.kind]).astype(np.float32)
            return rounded @ table.values[0, 0].astype(np.float32).T

        return self._node("MUL_MAT", name, [table, x], ne, multiplied)

    def _added(self, name: str, a: Made, b: Made) -> Made:
        return self._node("ADD", name, [a, b], tuple(a.tensor.ne), lambda: a.values + b.values)

    def _rope(self, x: Made, places: Made) -> Made:
        count, name = x.tensor.ne[1], bytes(x.tensor.name).decode()
        heads = self._view("RESHAPE", x, (WIDTH, HEADS, count))
        base, mode = 10000.0, 2 if self.neox else 0

        def turned() -> Array:
            own = self.settings.get("base", base)
            angle = places.values.ravel()[:, None] * own ** (-np.arange(0, WIDTH, 2) / WIDTH)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            made, values = np.empty_like(heads.values[0]), heads.values[0]
            half = WIDTH // 2
            one, two = ((slice(0, half), slice(half, None)) if self.neox
                        else (slice(0, None, 2), slice(1, None, 2)))  # fmt: skip
            a, b = values[..., one], values[..., two]
            made[..., one], made[..., two] = a * cos - b * sin, a * sin + b * cos
            return made[None]

        params = (0, WIDTH, mode, 0, 512, base, 1.0, 0.0, 1.0, 32.0, 1.0)
        return self._node("ROPE", name, [heads, places], (WIDTH, HEADS, count), turned, params)

    def _store(self, cache: Made, new: Made, at: Array) -> None:
        """Write rows into the cache, as ``SET_ROWS`` does: a node without values of its own."""
        made = self._leaf("cache (view)", F32, (HIDDEN, CELLS), cache.data)
        made.op, made.tensor.view_src = "SET_ROWS", ctypes.pointer(cache.tensor)
        made.tensor.src[0] = ctypes.pointer(new.tensor)

        def written() -> Array:
            cache.values[0, 0, at] = new.values.reshape(len(at), HIDDEN)
            return cache.values

        self._graph.append((made, written))

    def _attention(self, q: Made, mask: Made, count: int) -> Made:
        keys, rest = self._cache
        step = 4 * HIDDEN
        head, cell = 4 * WIDTH, (4, step)
        k = self._view("VIEW", keys, (WIDTH, CELLS, HEADS), (*cell, head, CELLS * step))
        v = self._view("VIEW", rest, (CELLS, WIDTH, HEADS), (step, 4, head, CELLS * step))
        nb = tuple(q.tensor.nb)
        turned = self._view(
            "PERMUTE", q, (WIDTH, count, HEADS), (nb[0], nb[2], nb[1], nb[3]), (0, 2, 1, 3)
        )
        scores = self._node(
            "MUL_MAT", "kq-0", [k, turned], (CELLS, count, HEADS),
            lambda: turned.values @ k.values.swapaxes(-1, -2),
        )  # fmt: skip
        scale = WIDTH**-0.5

        def softmax() -> Array:
            own = self.settings.get("scale", scale)
            x = scores.values * np.float32(own) + mask.values
            x = np.exp(x - x.max(-1, keepdims=True))
            return x / x.sum(-1, keepdims=True)

        weights = self._node("SOFT_MAX", "kq_soft_max-0", [scores, mask], (CELLS, count, HEADS),
                             softmax, (scale, 0.0))  # fmt: skip
        mixed = self._node(
            "MUL_MAT", "kqv-0", [v, weights], (WIDTH, count, HEADS),
            lambda: weights.values @ v.values.swapaxes(-1, -2),
        )  # fmt: skip
        nb = tuple(mixed.tensor.nb)
        merged = self._view(
            "PERMUTE", mixed, (WIDTH, HEADS, count), (nb[0], nb[2], nb[1], nb[3]), (0, 2, 1, 3)
        )
        return self._node("CONT", "kqv_out-0", [merged], (HIDDEN, count),
                          lambda: merged.values.reshape(1, 1, count, HIDDEN))  # fmt: skip

    # -- running ----------------------------------------------------------------------------------

    def run(self, tokens: list[int], start: int) -> None:
        """Compute tokens, and show each node to the callback as ggml's scheduler does."""
        self._graph: list[tuple[Made, Callable[[], Array] | None]] = []
        self._layer(tokens, start)
        for made, values in self._graph:
            wanted = self.on_node(made.address, True)
            if values is not None:
                name = bytes(made.tensor.name).decode()
                found = values().astype(np.float32)
                found = self.spoil.get(f"{name}/{made.op}", lambda x: x)(found)
                made.values[...] = found.reshape(made.values.shape)
            if wanted:
                self.on_node(made.address, False)
        self._kept += [made for made, _ in self._graph]  # addresses are not used again

    def eval(self, tokens: list[int]) -> None:
        start, self.n_tokens = self.n_tokens, self.n_tokens + len(tokens)
        rows = [BatchRow(token, start + at, 0) for at, token in enumerate(tokens)]
        if self.around is None:
            self.run(tokens, start)
        else:
            self.around(lambda: self.run(tokens, start), rows)


class Context:
    """Stands for the second context of a ``Llama``."""

    architecture, unified, cache_types = "llama", True, {"f32"}

    def __init__(self, llama: Fake, on_node: Callable[[int, bool], bool]) -> None:
        self._llama, self.library = llama, llama.library
        llama.on_node = on_node

    def probe(self) -> None:
        self._llama.run([0], 0)
        for cache in self._llama._cache:
            cache.data[:] = 0

    def put_in(self, around: Callable[..., None]) -> None:
        self._llama.around = around

    def take_out(self) -> None:
        self._llama.around, self._llama.on_node = None, lambda address, ask: False

    def free(self) -> None: ...


def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ld.dump` take fakes for llama.cpp's."""
    module = types.ModuleType("llama_cpp")
    module.Llama = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(llamacpp_steps, "Context", Context)


# -- blocks of 32 whole numbers and a scale --------------------------------------------------------


def quantised(values: Array) -> Array:
    """Return the bytes of Q8_0, as ``quantize_row_q8_0_ref`` makes them."""
    codes, scales = rounded_to_blocks(values)
    made = np.zeros((len(codes), BLOCK_BYTES), np.uint8)
    made[:, :2] = scales[:, None].view(np.uint8)
    made[:, 2:] = codes.astype(np.int8).view(np.uint8)
    return made.ravel()


def rounded_to_blocks(values: Array) -> tuple[Array, Array]:
    """Return whole numbers ``[blocks, 32]`` and the scale of each block, float16."""
    codes, scales = [], []
    for block in values.astype(np.float32).reshape(-1, BLOCK):
        scale = np.float32(np.abs(block).max() / np.float32(127))
        by = np.float32(1) / scale if scale else np.float32(0)
        codes.append([math.floor(abs(x) + 0.5) * (1 if x > 0 else -1) for x in block * by])
        scales.append(np.float16(scale))
    return np.array(codes), np.array(scales)


def blocks_of(data: Array) -> tuple[Array, Array]:
    blocks = data.reshape(-1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).ravel().astype(np.float32)
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), scales


def product_of_blocks(table: Array, x: Array) -> Array:
    """Return the products of each row of x with each of a table: whole numbers, block by block."""
    width = x.shape[-1] // BLOCK
    codes, scales = blocks_of(table)
    codes = codes.reshape(-1, width, BLOCK).astype(np.int32)
    other, by = rounded_to_blocks(x)
    other, by = other.reshape(-1, width, BLOCK), by.reshape(-1, width).astype(np.float32)
    whole = np.einsum("twb,rwb->trw", other, codes).astype(np.float32)
    return (whole * by[:, None] * scales.reshape(-1, width)).sum(-1, dtype=np.float32)
