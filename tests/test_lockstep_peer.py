"""Lockstep of two processes: the same report, and nobody but the other one is listened to."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llmdebug_nb as ld
from llmdebug_nb.app.lockstep import frames
from llmdebug_nb.core.errors import CaptureError, PeerError
from lockstep_pairs import BUGS, DOWN, INPUTS, NORM, SECRET, hooks, nothing_is_left, told, two  # noqa: F401
from recordings import scaled


class Peer:
    """`lockstep_peer` in a thread, as it would run in another process."""

    def __init__(self, model: Any, secret: str = SECRET) -> None:
        self.error: BaseException | None = None
        ready: queue.Queue[str] = queue.Queue()

        def serve() -> None:
            try:
                ld.lockstep_peer(model, "tcp://127.0.0.1:0", INPUTS, secret=secret, ready=ready.put)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        self.told = ready
        self.address = ready.get(timeout=30)

    def ended(self) -> BaseException | None:
        self.thread.join(30)
        assert not self.thread.is_alive()
        return self.error


@pytest.mark.parametrize("remote", ["golden", "mine"])
@pytest.mark.parametrize("window", ["1GiB", "60kB"])
def test_the_report_with_another_process_is_the_same(remote: str, window: str) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    expected = ld.lockstep(golden, mine, INPUTS, progress=False)
    given = {"golden": golden, "mine": mine}
    peer = Peer(given[remote])
    given[remote] = peer.address
    options = {"secret": SECRET, "window": window, "progress": False}
    report = ld.lockstep(given["golden"], given["mine"], INPUTS, **options)
    assert peer.ended() is None
    assert [(f.path, f.cause) for f in report.findings] == [
        (f.path, f.cause) for f in expected.findings
    ]
    both = told(report), told(expected)
    assert {k: both[0][k] for k in ("verdict", "errors", "coverage")} == {
        k: both[1][k] for k in ("verdict", "errors", "coverage")
    }


def test_grafts_go_into_another_process() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    peer = Peer(mine)
    report = ld.lockstep(golden, peer.address, INPUTS, graft=True, secret=SECRET, progress=False)
    assert peer.ended() is None
    assert {f.path for f in report.findings} == {DOWN, NORM}


def test_another_process_stops_too() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    seen: list[str] = []
    mine.model.layers[2].register_forward_pre_hook(lambda *_: seen.append("layer 2"))
    peer = Peer(mine)
    report = ld.lockstep(golden, peer.address, INPUTS, stop="first", secret=SECRET, progress=False)
    assert peer.ended() is None
    assert seen == []
    assert report.lockstep.stopped.startswith(DOWN)


def test_another_secret_is_refused_by_both_and_ends_no_offer() -> None:
    golden, mine = two()
    peer = Peer(mine, "another secret")
    with pytest.raises(PeerError, match="another secret"):
        ld.lockstep(golden, peer.address, INPUTS, secret=SECRET)
    assert "has another secret" in peer.told.get(timeout=30)
    report = ld.lockstep(golden, peer.address, INPUTS, secret="another secret", progress=False)
    assert report.verdict == "match"
    assert peer.ended() is None


def test_nobody_at_the_address_is_told() -> None:
    golden, _ = two()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerError, match="nobody answers"):
        ld.lockstep(golden, f"tcp://127.0.0.1:{port}", INPUTS, secret=SECRET)


def test_a_failure_of_the_other_program_is_told() -> None:
    golden, mine = two()
    mine.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    peer = Peer(mine)
    with pytest.raises(CaptureError, match="ZeroDivisionError"):
        ld.lockstep(golden, peer.address, INPUTS, secret=SECRET, progress=False)
    peer.ended()
    assert not any(hooks(golden))


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object], stays: bool) -> Iterator[str]:
    """Yield the address of a process that is none of ours. ``stays``: until the other has gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError, PeerError):
                answer(connection)
                connection.settimeout(30)
                while stays and connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)


def proven(connection: socket.socket, *sent: bytes) -> None:
    """Prove the secret, take the beginning, and send bytes."""
    link = frames.Link(connection, "test", 30)
    link.prove(SECRET.encode(), listens=True)
    link.receive()
    for data in sent:
        connection.sendall(data)


def frame(message: Any, body: bytes = b"") -> bytes:
    header = frames._encoder.encode(message)
    return struct.pack(">IQ", len(header), len(body)) + header + body


HELLO = frames._HELLO.pack(frames._MAGIC, frames.VERSION, bytes(32))
HOSTILE: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "closes at once": (lambda c: None, "is gone"),
    "another protocol": (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4), "no llmdebug"),
    "another version": (
        lambda c: c.sendall(frames._HELLO.pack(frames._MAGIC, 99, bytes(32))), "version 99",
    ),
    "no proof": (
        lambda c: c.sendall(HELLO + bytes(32)),
        "another secret",
    ),
    "a huge frame": (lambda c: proven(c, struct.pack(">IQ", 2**32 - 1, 2**63)), "too long"),
    "no message": (lambda c: proven(c, struct.pack(">IQ", 4, 0) + b"\xc1abc"), "no valid message"),
    "a message of mine": (lambda c: proven(c, frame(frames.More())), "fits nothing"),
    "dies": (lambda c: proven(c, frame(frames.Paused())), "is gone"),
    "a row that is none": (
        lambda c: proven(c, frame(frames.Paused()), frame(frames.Told([1, "x"]))),
        r"no row|is gone",
    ),
    "a table that is none": (
        lambda c: proven(c, frame(frames.Paused()), frame(frames.Table("sqlite_master", []))),
        "fits nothing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_peer_is_refused(case: str) -> None:
    answer, message = HOSTILE[case]
    golden, _ = two()
    stays = case not in ("closes at once", "dies")
    with answering(answer, stays) as address, pytest.raises(PeerError, match=message):
        ld.lockstep(golden, address, INPUTS, secret=SECRET, progress=False)
    assert not any(hooks(golden))


def test_a_peer_gives_nothing_of_its_secret_to_who_has_none() -> None:
    golden, mine = two()
    peer = Peer(mine)
    with socket.create_connection(frames.checked_address(peer.address)) as connection:
        connection.sendall(HELLO + bytes(32))
        given = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert len(given) == frames._HELLO.size  # a greeting, and no proof to guess at
    assert "has another secret" in peer.told.get(timeout=30)
    report = ld.lockstep(golden, peer.address, INPUTS, secret=SECRET, progress=False)
    assert report.verdict == "match"


STRAY: dict[str, Callable[[socket.socket], object]] = {
    "leaves": lambda c: None,
    "speaks HTTP": lambda c: c.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100)),
    "drips": lambda c: [(c.sendall(b"l"), time.sleep(0.05)) for _ in range(20)],
}


@pytest.mark.parametrize("kind", STRAY)
def test_a_stray_connection_ends_no_offer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE", 0.5)  # in all, not for each byte
    golden, mine = two()
    peer = Peer(mine)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(frames.checked_address(peer.address)) as connection,
    ):
        STRAY[kind](connection)
    assert "still waiting" in peer.told.get(timeout=30)
    monkeypatch.undo()
    report = ld.lockstep(golden, peer.address, INPUTS, secret=SECRET, progress=False)
    assert report.verdict == "match"


def test_a_secret_is_made_if_none_is_given() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    ready: queue.Queue[str] = queue.Queue()
    thread = threading.Thread(
        target=ld.lockstep_peer,
        daemon=True,
        args=(mine, "tcp://127.0.0.1:0", INPUTS),
        kwargs={"ready": ready.put},
    )
    thread.start()
    address, word, secret = ready.get(timeout=30).split()
    assert word == "secret"
    report = ld.lockstep(golden, address, INPUTS, secret=secret, progress=False)
    thread.join(30)
    assert report.findings[0].path == DOWN
