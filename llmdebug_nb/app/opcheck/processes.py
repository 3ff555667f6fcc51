"""Checks in several processes: each opens the run itself and is told which calls to check."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import IO

import msgspec

from llmdebug_nb.app.opcheck.checking import Checker, How
from llmdebug_nb.app.opcheck.choosing import Call
from llmdebug_nb.app.runs import open_run
from llmdebug_nb.core import constants
from llmdebug_nb.replay.checks import FAILS, CallCheck

_START = (
    f"import json, sys; sys.path[:] = json.loads(sys.argv[1]);from {__name__} import serve; serve()"
)
CHUNK = 16  # calls that a process gets at once
_CRASHES = 3  # of one process


def check_in_processes(
    where: str, calls: Sequence[Call], how: How, jobs: int
) -> Iterator[CallCheck]:
    """Yield the checks of calls as they come. The processes end with the iterator."""
    waiting: queue.SimpleQueue[list[Call]] = queue.SimpleQueue()
    for start in range(0, len(calls), CHUNK):
        waiting.put(list(calls[start : start + CHUNK]))
    found: queue.SimpleQueue[CallCheck | None] = queue.SimpleQueue()
    workers = [_Worker(where, how, waiting, found) for _ in range(jobs)]
    try:
        for worker in workers:
            worker.start()
        running = len(workers)
        while running:
            check = found.get()
            if check is None:
                running -= 1
            else:
                yield check
    finally:
        for worker in workers:
            worker.stop()


class _Worker(threading.Thread):
    """Asks one process, and starts it anew if it ends before its answer."""

    def __init__(
        self, where: str, how: How, waiting: queue.SimpleQueue[list[Call]],
        found: queue.SimpleQueue[CallCheck | None],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self._where, self._how, self._waiting, self._found = where, how, waiting, found
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._crashes = 0

    def run(self) -> None:
        try:
            while not self._stopped:
                try:
                    left = self._waiting.get_nowait()
                except queue.Empty:
                    break
                while left and not self._stopped:
                    left = self._checked(left)
        finally:
            self.stop()
            self._found.put(None)

    def stop(self) -> None:
        """End the process; calls that it is at are checked another time."""
        self._stopped = True
        self._close()

    def _close(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # what it did not take
                        stream.close()

    def _checked(self, calls: list[Call]) -> list[Call]:
        """Have calls checked; return those that are left, after the one that ends the process."""
        done = 0
        why = "its process could not be started again and again"
        if self._crashes < _CRASHES:
            try:
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(_line([asdict(call) for call in calls]))
                process.stdin.flush()
                for line in process.stdout:
                    self._found.put(CallCheck.read(line))
                    done += 1
                    if done == len(calls):
                        return []
            except (OSError, ValueError):
                pass
            if self._stopped:
                return []
            self._crashes += 1
            why = f"its process ended ({self._end()})"
        call = calls[done]
        self._found.put(
            CallCheck(call.record, call.key, call.op, call.id, reason=FAILS, detail=why)
        )
        return calls[done + 1 :]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, json.dumps(folders)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            assert self._process.stdin is not None
            self._process.stdin.write(_line({"run": self._where, "how": asdict(self._how)}))
        return self._process

    def _end(self) -> str:
        process = self._process
        if process is None:
            return "it did not start"
        with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself, or is hung
            process.wait(constants.REPLAY_END)
        self._close()
        self._process = None
        return f"status {process.returncode}"


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


# -- the process itself ----------------------------------------------------------------------------


def serve() -> None:
    """Check the calls that are asked for, until there are no more."""
    import torch

    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)  # what an operator prints is no answer
    torch.set_num_threads(1)  # the processes share the cores
    start = json.loads(asked.readline())
    checker = Checker(open_run(start["run"]), msgspec.convert(start["how"], How))
    _serve(checker, asked, answers)


def _serve(checker: Checker, asked: IO[bytes], answers: IO[bytes]) -> None:
    for line in asked:
        for call in msgspec.convert(json.loads(line), list[Call]):
            answers.write(checker.check(call).line().encode() + b"\n")
            answers.flush()
