"""llama-cpp-python's internals: the context of a ``Llama``, and one that stands in for it.

A callback for each node can be given to a context only as it is made. So a recording makes a second
context on the same weights, copies the state, and lets the ``Llama`` use that one until it ends;
then the state goes back. Private are ``_ctx`` and ``_model`` of a ``Llama``, and of its context
``ctx``, ``memory``, ``params``, ``decode``, ``encode`` and ``close``. llama-cpp-python 0.3.36. What
is missing is named in the error, with the release. Nothing here imports llama_cpp.

A recording of whatever runs learns of a ``Llama`` as it first computes.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from llmdebug_nb.capture.compat import pytorch
from llmdebug_nb.capture.compat.ggml_tensors import Library
from llmdebug_nb.capture.listeners import Listeners, with_methods
from llmdebug_nb.core.errors import CaptureError

PACKAGE = "llama_cpp"
_OF_CONTEXT = ("ctx", "memory", "params", "decode", "encode", "close")


class Llama(Protocol):
    """A ``llama_cpp.Llama``."""

    @property
    def n_tokens(self) -> int: ...
    def eval(self, tokens: list[int]) -> None: ...


class BatchRow(NamedTuple):
    """A token of a batch. ``sequence``: the first one that it belongs to."""

    token: int | None
    position: int
    sequence: int


class Listener(Protocol):
    """Is told of each ``Llama`` that is about to compute tokens."""

    def computes(self, llama: Llama) -> None: ...


_COMPUTE = ("eval", "embed")  # the methods of a ``Llama`` that give a batch to its context


def _wrap(module: ModuleType) -> Callable[[], None]:
    """Tell the listeners of each ``Llama`` that computes; return a function that undoes this."""
    kind = module.Llama
    own = vars(kind)
    return with_methods((kind, name, _told(own[name])) for name in _COMPUTE if name in own)


def _told(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def compute(llama: Llama, *args: object, **kwargs: object) -> object:
        for listener in listeners.at_run(llama):
            listener.computes(llama)
        return original(llama, *args, **kwargs)

    return compute


listeners: Listeners[Listener] = Listeners(lambda: pytorch.with_module(PACKAGE, _wrap))


def release() -> str:
    return str(getattr(sys.modules.get(PACKAGE), "__version__", "of an unknown release"))


def needed(holder: object, name: str) -> Any:
    """Return an attribute. Raises CaptureError, which names it, if it is missing."""
    found = getattr(holder, name, None)
    if found is None:
        kind = holder.__name__ if isinstance(holder, ModuleType) else type(holder).__name__
        raise CaptureError(
            f"llama_cpp {release()}: {kind} has no {name!r}, which 0.3.36 has; record with that"
            " release"
        )
    return found


class Context:
    """A second context for a ``Llama``, with a callback for each node.

    ``library``: reads its tensors. ``architecture``: of the model.
    """

    def __init__(self, llama: Llama, on_node: Callable[[int, bool], bool]) -> None:
        """``on_node(address, ask)``: see `ggml_backend_sched_eval_callback`; it must not raise.

        Raises CaptureError: something is missing, or there is no memory for it.
        """
        self._llama = llama
        self._api: Any = needed(sys.modules.get(PACKAGE), PACKAGE)
        self._holder: Any = needed(llama, "_ctx")
        for name in _OF_CONTEXT:
            if name != "memory":  # models without a cache have none
                needed(self._holder, name)
        self.library = Library(needed(self._api, "_lib"), release())
        self._model: Any = needed(needed(llama, "_model"), "model")
        kind = needed(self._api, "ggml_backend_sched_eval_callback")

        def call(address: int | None, ask: bool, _: object) -> bool:
            return on_node(address or 0, ask)

        self._callback = kind(call)
        self._own: Any = self._made(self._holder.params)

    def _made(self, params: Any) -> Any:
        if ctypes.cast(params.cb_eval, ctypes.c_void_p).value:
            raise CaptureError("this Llama has a cb_eval of its own; make it without one")
        params = type(params).from_buffer_copy(params)
        params.cb_eval = self._callback
        own = needed(self._api, "llama_init_from_model")(self._model, params)
        if not own:
            raise CaptureError("llama.cpp could not make a second context: is there memory left?")
        theirs = self._holder.ctx
        threads = (self._api.llama_n_threads(theirs), self._api.llama_n_threads_batch(theirs))
        self._api.llama_set_n_threads(own, *threads)
        lora = getattr(self._llama, "_lora_adapter", None)
        if lora is not None:
            adapters = (self._api.llama_adapter_lora_p_ctypes * 1)(lora)
            scales = (ctypes.c_float * 1)(self._llama.lora_scale)  # type: ignore[attr-defined]
            self._api.llama_set_adapters_lora(own, adapters, 1, scales)
        return own

    @property
    def architecture(self) -> str:
        """The model's architecture, as its file names it: ``llama``."""
        text = ctypes.create_string_buffer(256)
        found = self._api.llama_model_meta_val_str(
            self._model, b"general.architecture", text, len(text)
        )
        return text.value.decode(errors="replace") if found > 0 else "llama.cpp"

    @property
    def unified(self) -> bool:
        """All sequences share one cache: the tokens of a batch are computed in its order."""
        params = self._holder.params
        return bool(params.kv_unified) or params.n_seq_max <= 1

    @property
    def cache_types(self) -> set[str]:
        """The types of the keys and values in the cache: ``f16``."""
        params = self._holder.params
        return {self.library.type_name(kind) for kind in (params.type_k, params.type_v)}

    def probe(self) -> None:
        """Compute one token in our context, whose cache is empty. Raises CaptureError."""
        batch = self._api.llama_batch_init(1, 0, 1)
        try:
            batch.n_tokens, batch.token[0], batch.pos[0] = 1, 0, 0
            batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
            if self._api.llama_decode(self._own, batch):
                raise CaptureError("llama.cpp could not compute one token of this model alone")
        finally:
            self._api.llama_batch_free(batch)
            memory = self._api.llama_get_memory(self._own)
            if memory:
                self._api.llama_memory_clear(memory, True)

    # -- standing in ------------------------------------------------------------------------------

    def put_in(self, around: Callable[[Callable[[], None], list[BatchRow]], None]) -> None:
        """Copy the state, and let the ``Llama`` use this context. ``around(decode, rows)``.

        Raises CaptureError: the state could not be copied.
        """
        holder, theirs, memory = self._holder, self._holder.ctx, self._holder.memory
        self._copy_state(theirs, self._own)
        decode, close = holder.decode, holder.close

        def decoded(batch: object) -> None:
            around(lambda: decode(batch), rows_of(batch))

        def closed() -> None:  # the program closes its Llama: both contexts go
            self._leave()
            self.free()
            close()

        def leave() -> None:
            holder.ctx, holder.memory = theirs, memory
            del holder.decode, holder.close

        self._theirs, self._leave = theirs, leave
        holder.ctx, holder.memory = self._own, self._api.llama_get_memory(self._own)
        holder.decode, holder.close = decoded, closed

    def take_out(self) -> None:
        """Copy the state back, and let the ``Llama`` use its own context again; free ours.

        Raises CaptureError: the state can't be copied; our context then stays in its place.
        """
        if self._own is not None and self._holder.ctx == self._own:
            self._copy_state(self._own, self._theirs)
            self._leave()
        self.free()

    def free(self) -> None:
        """Free our context; nothing happens if that is done."""
        own, self._own = self._own, None
        if own is not None:
            self._api.llama_free(own)

    def _copy_state(self, source: object, target: object) -> None:
        size = self._api.llama_state_get_size(source)
        state = (ctypes.c_uint8 * size)()
        kept = self._api.llama_state_get_data(source, state, size)
        if not kept or not self._api.llama_state_set_data(target, state, kept):
            raise CaptureError(
                f"llama.cpp could not copy its state of {size:,} bytes to another context;"
                " call reset() on the Llama before it is recorded"
            )


def rows_of(batch: object) -> list[BatchRow]:
    """Return the tokens of a ``LlamaBatch``. Raises CaptureError: it has another layout."""
    given: Any = needed(batch, "batch")
    count = int(needed(given, "n_tokens"))
    return [
        BatchRow(
            int(given.token[at]) if given.token else None,
            int(given.pos[at]) if given.pos else at,
            int(given.seq_id[at][0]) if given.seq_id else 0,
        )
        for at in range(count)
    ]
