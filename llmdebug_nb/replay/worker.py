"""Replays in a process of its own, for runs that this process did not record.

A dump from elsewhere may hold tensors and arguments that crash an operator, or keep it busy. Then
only that process ends, and the call can't be replayed. It is started at the first replay, limited
in time and memory, and ends when nothing is asked for a while. What goes to it and comes back is
JSON and the raw bytes of tensors; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, cast

import torch

from llmdebug_nb.core import constants
from llmdebug_nb.core.dtypes import DTYPE_NAMES, DTYPES
from llmdebug_nb.core.kernels.raw import from_bytes, plain, to_bytes, unreadable
from llmdebug_nb.replay.checks import FAILS
from llmdebug_nb.replay.execution import Results, Task, run
from llmdebug_nb.replay.operators import CannotReplay

_START = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[1]);from {__name__} import serve; serve()"
)
_LENGTH = struct.Struct("<Q")  # of a header, in bytes
# fields of a task
_PLAIN = ("op", "most", "shapes", "seed", "steps", "device", "settled", "wide", "wanted")


class Replays:
    """The replays of one comparison in that process, which all comparisons share."""

    def __init__(self) -> None:
        self._ended = 0

    def run(self, task: Task) -> Results:
        """Return what `execution.run` returns.

        Raises:
            CannotReplay: it raises that, or the process ends or takes too long.
        """
        if self._ended == constants.REPLAY_CRASHES:
            raise CannotReplay(f"{self._ended} replays have crashed or taken too long")
        try:
            answer, tensors = _worker.ask(*_message(task))
        except _EndedError as why:
            self._ended += 1
            raise CannotReplay(f"the replay of {task.op} {why}") from None
        if isinstance(answer, dict):
            raise CannotReplay(answer["why"], answer["kind"])
        return list(zip(map(str, answer), tensors, strict=True))


class _EndedError(Exception):
    """The process has ended; the message says how."""


class _Worker:
    """The process, while it runs, as the one that asks sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(
        self, message: object, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Send a message and return the answer. Raises _EndedError."""
        with self._lock:
            for _ in range(2):  # it may just have ended by itself
                process = self._running()
                late = threading.Event()
                timer = threading.Timer(constants.REPLAY_SECONDS, _stop, (process, late))
                timer.daemon = True
                timer.start()
                try:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    _send(process.stdin, message, tensors)
                    return _receive(process.stdout)
                except (OSError, EOFError, ValueError):
                    status = self._end()
                except BaseException:  # an interrupt: the answer would be taken for the next one
                    self._end()
                    raise
                finally:
                    timer.cancel()
                if late.is_set():
                    raise _EndedError(f"takes longer than {constants.REPLAY_SECONDS} s")
                if status != 0:
                    break
            raise _EndedError(f"ended its process ({_status_text(status)})")

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if it does not run, or is that of a parent process."""
        if self._owner != os.getpid():
            self._process = None
        if self._process is None or self._process.poll() is not None:
            self._end()
            folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
            kept = {k: v for k, v in os.environ.items() if not k.startswith("LLMDEBUG")}
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, json.dumps(folders)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    env=kept, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise _EndedError(
                    f"needs a process of its own, which can't start: {error}"
                ) from None
            self._owner = os.getpid()
        return self._process

    def _end(self) -> int:
        """End the process and return its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it did not take
                    stream.close()
        try:
            return process.wait(constants.REPLAY_END)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


_worker = _Worker()


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _status_text(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


# -- messages --------------------------------------------------------------------------------------


def _message(task: Task) -> tuple[dict[str, object], list[torch.Tensor]]:
    """Return a task and its tensors, with the settings that decide how sums are rounded."""
    tensors: list[torch.Tensor] = []
    message = {
        **{field: getattr(task, field) for field in _PLAIN},
        "gradients": _coded(task.gradients, tensors),
        "args": _coded(task.args, tensors),
        "kwargs": _coded(task.kwargs, tensors),
        "threads": torch.get_num_threads(),
        "dtype": DTYPE_NAMES[torch.get_default_dtype()],
        "precision": torch.get_float32_matmul_precision(),
    }
    return message, tensors


def _task(message: dict[str, Any], tensors: list[torch.Tensor]) -> Task:
    """Return the task of a message, and apply its settings."""
    if torch.get_num_threads() != message["threads"]:
        torch.set_num_threads(message["threads"])
    torch.set_default_dtype(DTYPES[message["dtype"]])
    torch.set_float32_matmul_precision(message["precision"])
    shapes = message["shapes"]
    return Task(
        message["op"],
        cast(list[object], _decoded(message["args"], tensors)),
        cast(dict[str, object], _decoded(message["kwargs"], tensors)),
        message["most"],
        shapes and {slot: tuple(shape) for slot, shape in shapes.items()},
        message["seed"],
        message["steps"],
        message["device"],
        message["settled"],
        cast(dict[str, torch.Tensor] | None, _decoded(message["gradients"], tensors)),
        message["wide"],
        tuple(message["wanted"]),
    )


def _coded(value: object, tensors: list[torch.Tensor]) -> object:
    """Return an argument for JSON: a list of its kind and parts, unless it is plain."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, (tuple, list)):
        return [type(value).__name__, *(_coded(part, tensors) for part in value)]
    if isinstance(value, dict):
        return ["dict", *(_coded(pair, tensors) for pair in value.items())]
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return ["slice", *(_coded(part, tensors) for part in parts)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return ["dtype", DTYPE_NAMES[value]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if value is ...:
        return ["..."]
    raise CannotReplay(f"an argument is a {type(value).__name__}, which is not passed on")


def _decoded(code: object, tensors: list[torch.Tensor]) -> object:
    if not isinstance(code, list):
        return code
    kind, parts = code[0], code[1:]
    if kind == "tensor":
        return tensors[parts[0]]
    if kind in _BUILT:
        return _BUILT[kind](*parts)
    values: Iterable[Any] = (_decoded(part, tensors) for part in parts)
    return slice(*values) if kind == "slice" else _HOLDING[kind](values)


_BUILT: dict[str, Callable[..., object]] = {
    "complex": complex,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "...": lambda: ...,
}
_HOLDING: dict[str, Callable[..., object]] = {"tuple": tuple, "list": list, "dict": dict}


def _send(stream: IO[bytes], message: object, tensors: Sequence[torch.Tensor]) -> None:
    """Write the length of a header, the header, and the bytes of the tensors."""
    described = [(str(x.dtype).removeprefix("torch."), list(x.shape)) for x in tensors]
    header = json.dumps([message, described]).encode()
    stream.write(_LENGTH.pack(len(header)) + header)
    for tensor in tensors:
        stream.write(to_bytes(tensor).data)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[Any, list[torch.Tensor]]:
    """Read what `_send` writes.

    Raises:
        EOFError: the other side has ended. ValueError: it sent something else.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    message, described = json.loads(_read(stream, length))
    tensors = []
    for dtype, shape in described:
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        tensors.append(from_bytes(_read(stream, nbytes), dtype, tuple(shape)))
    return message, tensors


def _read(stream: IO[bytes], count: int) -> bytes:
    if count > _memory():
        raise ValueError(f"a message of {count} bytes")
    data = stream.read(count)
    if len(data) < count:
        raise EOFError
    return data


# -- the process itself ----------------------------------------------------------------------------


def serve() -> None:
    """Answer tasks until there are no more, or none came for a while."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)  # what an operator prints is no answer
    _limit()
    while True:
        idle = threading.Timer(constants.REPLAY_IDLE, os._exit, (0,))
        idle.daemon = True
        idle.start()
        try:
            message, tensors = _receive(asked)
        except EOFError:
            return
        finally:
            idle.cancel()
        _send(answers, *_answer(message, tensors))


def _answer(
    message: dict[str, Any], tensors: list[torch.Tensor]
) -> tuple[list[str] | dict[str, str], list[torch.Tensor]]:
    """Return the slots and tensors of the results, or why there are none."""
    try:
        results = run(_task(message, tensors))
    except CannotReplay as why:
        return {"why": str(why), "kind": why.kind}, []
    except MemoryError:
        return {"why": "the replay needs too much memory", "kind": FAILS}, []
    for _, tensor in results:
        if (why_not := unreadable(tensor)) is not None:
            return {"why": f"its result can't be passed on: {why_not}", "kind": FAILS}, []
    return [slot for slot, _ in results], [plain(tensor) for _, tensor in results]


def _memory() -> int:
    """Return half of the memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _limit() -> None:
    """Limit memory, and forbid core dumps, where the system can: on Linux."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, FileNotFoundError):  # Windows, macOS
        return
    for limit, most in (
        (resource.RLIMIT_AS, used + _memory()),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
