"""Lockstep: the report of two dumps without dumps, in bounded memory, in one process or two."""

from __future__ import annotations

import _thread
import contextlib
import copy
import queue
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import llmdebug_nb as ld
import models
from llmdebug_nb.app.lockstep import frames
from llmdebug_nb.app.lockstep.window import Held, Place, Window
from llmdebug_nb.core.errors import (
    CaptureError,
    OptionError,
    PeerError,
    ProofError,
    TensorLookupError,
)
from recordings import record, scaled

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from ports.sets import PORTS
from zoo.entry import Case
from zoo.sets import SETS

ZOO = {entry.number: entry for entry in SETS["zoo"]}
IDS = torch.arange(1, 9)[None]
INPUTS = {"input_ids": IDS}
SECRET = "a secret of tests"
ALL: dict[str, Any] = {"mode": ("module", "api"), "weights": True}
MODULES: dict[str, Any] = {"mode": "module", "weights": True}


def two(*changes: Callable[[Any], object], **config: Any) -> tuple[Any, Any]:
    """Return a Llama, and its copy with changes."""
    golden = models.llama(**config)
    mine = copy.deepcopy(golden)
    for change in changes:
        change(mine)
    return golden, mine


DOWN, NORM = "model.layers.1.mlp.down_proj", "model.layers.2.input_layernorm"
BUGS = scaled(DOWN, 1.1), scaled(NORM, 0.9)


def told(report: Any) -> dict[str, object]:
    """Return what must not depend on how two programs were compared."""
    first = report.first_divergence
    return {
        "verdict": report.verdict,
        "rows": Counter(d.verdict for d in report.differences),
        "errors": [(str(d.site), d.error, d.limit) for d in report.differences],
        "coverage": str(report.coverage),
        "first": str(first and first.site),
        "findings": [(f.path, f.cause, f.step, f.evidence, f.relation) for f in report.findings],
    }


def dumped(golden: Any, mine: Any, work: Callable[[Any], object], **options: Any) -> Any:
    runs = [
        record(model, lambda model=model: work(model), name, **options)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    return ld.compare(*runs, progress=False)


def hooks(*several: torch.nn.Module) -> list[int]:
    return [
        len(part._forward_hooks) + len(part._forward_pre_hooks)
        for model in several
        for part in model.modules()
    ]


def lockstep_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("llmdebug lockstep")]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert lockstep_threads() == []


# -- as from dumps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "window", "options"),
    [("8", "1GiB", ALL), ("13", "1MB", ALL), ("13", "1GiB", MODULES), ("C5", "1MB", MODULES)],
)
def test_the_report_on_a_case_of_the_zoo_is_that_of_dumps(
    number: str, window: str, options: dict[str, Any]
) -> None:
    entry = ZOO[number]
    case = Case(entry, entry.on[0], "fp32" if "fp32" in entry.precisions else "bf16", 0)
    golden, (mine, _) = case.golden(), case.mine()

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    expected = told(dumped(golden.model, mine.model, work, **options))
    report = ld.lockstep(golden.model, mine.model, work, window=window, progress=False, **options)
    assert told(report) == expected
    assert report.lockstep.unsteady == 0


@pytest.mark.parametrize("bug", [None, "k_heads"])
def test_the_report_on_a_port_is_that_of_dumps(bug: str | None) -> None:
    port = PORTS["attention"]
    golden = port.golden()
    mine = port.mine(golden, bug and port.bug(bug))

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    expected = told(dumped(golden.model, mine.model, work, **MODULES))
    report = ld.lockstep(golden.model, mine.model, work, progress=False, **MODULES)
    assert told(report) == expected
    assert (report.verdict == "diverged") == (bug is not None)


def test_generated_tokens_are_compared() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> object:
        return model.generate(IDS, max_new_tokens=3, do_sample=False)

    report = ld.lockstep(golden, mine, work, progress=False)
    assert told(report) == told(dumped(golden, mine, work))
    assert len(report.golden.steps()) == 3


def test_gradients_are_compared() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> None:
        model(input_ids=IDS, labels=IDS).loss.backward()

    options = {"mode": "module", "phase": "both"}
    report = ld.lockstep(golden, mine, work, progress=False, **options)
    assert any(d.site.phase == "backward" for d in report.differences)
    assert all(p.grad is None for p in mine.parameters())
    assert told(report) == told(dumped(golden, mine, work, **options))


def test_other_lengths_are_told_as_from_dumps() -> None:
    golden, mine = two()

    def work(model: Any) -> object:
        return model(input_ids=IDS if model is golden else IDS[:, :5])

    report = ld.lockstep(golden, mine, work, progress=False)
    assert told(report) == told(dumped(golden, mine, work))


# -- memory ----------------------------------------------------------------------------------------


def test_values_beyond_the_window_are_made_again() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=8)
    whole = ld.lockstep(golden, mine, INPUTS, progress=False)
    small = ld.lockstep(golden, mine, INPUTS, window=30_000, progress=False)
    assert told(small) == told(whole)
    assert whole.lockstep.ran == (1, 1)
    assert sum(whole.lockstep.whole) > 4 * 30_000
    largest = max(m.summary.numel for m in small.mine.records()) * 4
    assert small.lockstep.most <= 30_000 + 3 * largest < sum(small.lockstep.whole)
    assert small.lockstep.ran > (1, 1)
    assert "at most" in str(small)


def test_a_value_larger_than_the_window_is_held_alone() -> None:
    window = Window(80)
    window.hold(Place(0, 0), Held(bytes(40), None))
    window.hold(Place(0, 40), Held(bytes(100), None))
    assert window.get(Place(0, 0)) is None
    assert window.get(Place(0, 40)) == Held(bytes(100), None)
    window.hold(Place(1, 0), Held(bytes(8), None))
    assert window.get(Place(0, 40)) is None
    assert window.most == 140  # of which 40 are forgotten at once


def test_values_are_there_after_the_comparison() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    before = mine(**INPUTS).logits.detach()
    report = ld.lockstep(golden, mine, INPUTS, window=20_000, progress=False)
    for run, model in ((report.golden, golden), (report.mine, mine)):
        tensor = run.tensor("lm_head")
        assert torch.equal(tensor, model(**INPUTS).logits)
        assert torch.equal(run.tensor("model.embed_tokens"), model.model.embed_tokens(IDS))
        assert not any(hooks(golden))
    assert torch.equal(mine(**INPUTS).logits, before)


def test_a_program_that_changes_its_weights_is_not_run_again() -> None:
    golden, mine = two(num_hidden_layers=8)

    def work(model: Any) -> None:
        model(input_ids=IDS)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.5)

    report = ld.lockstep(golden, mine, work, window=20_000, progress=False)
    with pytest.raises(TensorLookupError, match="changes its weights"):
        report.mine.tensor("model.embed_tokens")


def test_a_program_that_does_not_repeat_itself_is_told() -> None:
    golden, mine = two(num_hidden_layers=8)
    calls: list[int] = []

    def work(model: Any) -> None:
        calls.append(1)
        model(input_ids=IDS.roll(len(calls)))

    report = ld.lockstep(golden, mine, work, window=20_000, progress=False)
    with pytest.raises(TensorLookupError, match="does not repeat itself"):
        report.mine.tensor("model.embed_tokens")


def test_memory_that_nothing_was_written_to_does_not_move_other_values() -> None:
    golden, mine = two(num_hidden_layers=8)
    seen: list[int] = []

    def blank(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(1)  # now as the tensor before it, now as none before
        junk = output.clone() if len(seen) % 2 else torch.full_like(output, float(len(seen)))
        torch.mul(junk, 1.0)
        return output

    mine.model.embed_tokens.register_forward_hook(blank)
    report = ld.lockstep(golden, mine, INPUTS, window=60_000, progress=False, **ALL)
    assert torch.equal(report.mine.tensor("model.norm"), report.golden.tensor("model.norm"))
    assert report.lockstep.unsteady <= 2
    assert len(seen) > 1


def test_random_numbers_are_the_same_in_each_run_and_left_alone() -> None:
    golden, mine = two(scaled(DOWN, 1.1), attention_dropout=0.3, num_hidden_layers=4)
    for model in (golden, mine):
        model.train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    report = ld.lockstep(golden, mine, INPUTS, window=30_000, progress=False)
    assert torch.equal(torch.rand(4), expected)
    assert report.lockstep.ran > (1, 1)
    assert report.lockstep.unsteady == 0
    assert report.findings[0].path.startswith(DOWN)


# -- stop and graft --------------------------------------------------------------------------------


def test_both_programs_are_stopped_at_the_first_divergence() -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    seen: list[str] = []
    mine.model.layers[2].register_forward_pre_hook(lambda *_: seen.append("layer 2"))
    golden.lm_head.register_forward_pre_hook(lambda *_: seen.append("golden's head"))
    before = hooks(golden, mine)
    report = ld.lockstep(golden, mine, INPUTS, stop="first", progress=False)
    assert seen == []
    assert report.lockstep.stopped.startswith(DOWN)
    assert [f.path for f in report.findings] == [DOWN]
    assert "stopped at the first divergence" in str(report)
    assert hooks(golden, mine) == before


def test_programs_that_agree_are_not_stopped() -> None:
    golden, mine = two()
    mine = mine.to(torch.bfloat16)
    report = ld.lockstep(golden, mine, INPUTS, stop="first", progress=False)
    assert report.lockstep.stopped == ""
    assert report.verdict == "within_noise"


@pytest.mark.parametrize("wanted", [{"stop": "first"}, {"graft": True}])
def test_values_in_another_order_are_no_divergence(wanted: dict[str, Any]) -> None:
    port = PORTS["meta"]  # it rotates neighbouring channels, so its query weights are permuted
    golden = port.golden()
    mine = port.mine(golden)

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    report = ld.lockstep(golden.model, mine.model, work, progress=False, **wanted, **MODULES)
    took = report.lockstep
    assert (took.stopped, took.grafts) == ("", [])
    assert "layers.*.attention.wq" in took.passed
    assert report.verdict == "within_noise"
    assert "no stop and no graft at these places" in str(report)


@pytest.mark.parametrize("window", ["1GiB", "60kB"])
def test_a_graft_shows_two_bugs_in_one_pass(window: str) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    before = hooks(golden, mine)
    plain = ld.lockstep(golden, mine, INPUTS, window=window, progress=False)
    report = ld.lockstep(golden, mine, INPUTS, graft=True, window=window, progress=False)
    assert {f.path for f in report.findings} == {DOWN, NORM}
    assert report.verdict == "diverged"
    assert [graft.path for graft in report.lockstep.grafts] == [DOWN, NORM]
    results = [d for d in report.differences if d.site.path == "lm_head"]
    assert {d.verdict for d in results} == {"match"}
    assert {d.verdict for d in plain.differences if d.site.path == "lm_head"} == {"diverged"}
    assert hooks(golden, mine) == before


def test_a_graft_in_a_port_names_both_bugs() -> None:
    port = PORTS["attention"]
    golden = port.golden()
    mine = port.mine(golden, port.bug("k_heads"))
    right = port.mine(golden)
    last = next(p for p, m in reversed(list(right.model.named_modules())) if not [*m.children()])

    def work(model: Any) -> object:
        return (golden if model is golden.model else mine)()

    plain = ld.lockstep(golden.model, mine.model, work, progress=False)
    scaled(last, 1.2)(mine.model)
    report = ld.lockstep(golden.model, mine.model, work, graft=True, progress=False)
    paths = [finding.path for finding in report.findings]
    assert plain.findings[0].path in paths
    assert last in paths


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embed, self.encoder = nn.Linear(8, 8), nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(x))


@pytest.mark.parametrize("alone", [False, True])
def test_a_graft_leaves_a_layer_on_its_fast_path(alone: bool) -> None:
    golden = Encoder().eval().requires_grad_(False)
    golden = golden.encoder.layers[1] if alone else golden
    mine = copy.deepcopy(golden)
    (mine if alone else mine.encoder.layers[1]).linear1.weight.mul_(1.5)
    inputs = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    report = ld.lockstep(golden, mine, inputs, graft=True, progress=False)
    paths = [{each.site.path for each in run.records()} for run in (report.golden, report.mine)]
    assert paths[0] == paths[1]  # off that path, the modules inside a layer are called, too
    assert [graft.path for graft in report.lockstep.grafts] == ["" if alone else "encoder.layers.1"]
    assert not hooks(golden, mine).count(1)
    shared = nn.modules.module
    assert not shared._global_forward_hooks
    assert not shared._global_forward_pre_hooks


# -- proofs and calibration ------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["1GiB", "20kB"])
def test_a_proof_says_what_it_says_of_dumps(window: str) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    expected = dumped(golden, mine, lambda model: model(**INPUTS)).findings[0].prove()
    before, state = hooks(golden, mine), torch.get_rng_state()
    options = {"window": window, "progress": False, "prove": True}
    report = ld.lockstep(golden, mine, INPUTS, **options)
    proof = report.findings[0].proof
    assert replace(proof, next=None) == replace(expected, next=None)
    assert [proof.agrees, proof.next.path, expected.next.path] == [False, NORM, NORM]
    assert report.lockstep.unsteady == 0
    assert hooks(golden, mine) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_is_looked_into_and_a_finding_proven_after_the_comparison() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    report = ld.lockstep(golden, mine, INPUTS, window="20kB", progress=False)
    inside = report.look_inside()
    assert inside.findings[0].path == f"{DOWN}/Tensor.mul"
    assert report.findings[0].prove().agrees


def test_a_calibration_says_what_it_says_of_dumps() -> None:
    golden, mine = two(scaled(DOWN, 1.1))

    def work(model: Any) -> object:
        return model(**INPUTS)

    runs = [
        record(model, lambda model=model: work(model), name)
        for name, model in (("golden", golden), ("mine", mine))
    ]
    near = copy.deepcopy(golden)
    scaled("model.norm", 1.01)(near)
    other = record(near, lambda: work(near), "other")
    for calibrate in ("auto", [other]):
        expected = ld.compare(*runs, calibrate=calibrate, progress=False)
        options = {"window": "20kB", "progress": False, "calibrate": calibrate}
        report = ld.lockstep(golden, mine, work, **options)
        assert told(report) == told(expected)
        assert report.lockstep.ran > (1, 1)
    assert not any(hooks(golden))


@pytest.mark.parametrize("wanted", [{"stop": "first"}, {"graft": True}])
def test_a_stop_and_a_graft_are_neither_calibrated_nor_proven(wanted: dict[str, Any]) -> None:
    golden, mine = two(*BUGS, num_hidden_layers=4)
    for more, message in (({"prove": True}, "prove: not with"), ({"calibrate": "auto"}, "noise")):
        with pytest.raises(OptionError, match=message):
            ld.lockstep(golden, mine, INPUTS, **wanted, **more)
    report = ld.lockstep(golden, mine, INPUTS, progress=False, **wanted)
    with pytest.raises(ProofError, match="prove: not with stop or graft"):
        report.findings[0].prove()


# -- bad input -------------------------------------------------------------------------------------


def test_an_exception_of_one_program_ends_both() -> None:
    golden, mine = two()
    mine.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    before = hooks(golden, mine)
    with pytest.raises(CaptureError, match="mine failed: ZeroDivisionError"):
        ld.lockstep(golden, mine, INPUTS, progress=False)
    assert hooks(golden, mine) == before


def test_an_interrupt_ends_both() -> None:
    golden, mine = two()

    def interrupted(*_: object) -> None:
        _thread.interrupt_main()
        time.sleep(0.5)  # an interrupt is raised while the main thread waits for this one

    mine.model.layers[1].register_forward_pre_hook(interrupted)
    before = hooks(golden, mine)
    with pytest.raises(KeyboardInterrupt):
        ld.lockstep(golden, mine, INPUTS, progress=False)
    assert hooks(golden, mine) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": "last"}, "expected 'first'"),
        ({"stop": "first", "graft": True}, "goes on with nothing"),
        ({"window": "much"}, "number of bytes"),
        ({"name": "x"}, "writes no dump"),
        ({"inputs": 3}, "inputs: expected"),
        ({"mine": 3}, "torch.nn.Module"),
        ({"mine": "localhost:3", "secret": SECRET}, "tcp://host:port"),
        ({"mine": "tcp://127.0.0.1:1"}, "at least 8 characters"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    golden, mine = two()
    given = {"golden": golden, "mine": mine, "inputs": INPUTS, "progress": False, **arguments}
    with pytest.raises(OptionError, match=message):
        ld.lockstep(**given)


def test_two_models_with_a_module_in_common_are_refused() -> None:
    golden, mine = two()
    mine.lm_head = golden.lm_head
    with pytest.raises(OptionError, match="share the module lm_head"):
        ld.lockstep(golden, mine, INPUTS)


def test_a_running_recording_is_left_alone() -> None:
    golden, mine = two()
    with ld.dump(golden, name="r"):
        golden(**INPUTS)
        with pytest.raises(CaptureError, match="a recording is running"):
            ld.lockstep(golden, mine, INPUTS)


# -- two processes ---------------------------------------------------------------------------------


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

        self.thread = threading.Thread(target=serve)
        self.thread.start()
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


def test_another_secret_is_refused_by_both() -> None:
    golden, mine = two()
    peer = Peer(mine, "another secret")
    with pytest.raises(PeerError, match=r"another secret|is gone"):
        ld.lockstep(golden, peer.address, INPUTS, secret=SECRET)
    error = peer.ended()
    assert isinstance(error, PeerError)
    assert "another secret" in str(error) or "is gone" in str(error)


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


HOSTILE: dict[str, tuple[Callable[[socket.socket], object], str]] = {
    "closes at once": (lambda c: None, "is gone"),
    "another protocol": (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4), "no llmdebug"),
    "another version": (
        lambda c: c.sendall(frames._HELLO.pack(frames._MAGIC, 99, bytes(32))), "version 99",
    ),
    "no proof": (
        lambda c: c.sendall(frames._HELLO.pack(frames._MAGIC, 1, bytes(32)) + bytes(32)),
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


def test_a_peer_serves_nobody_without_the_secret() -> None:
    peer = Peer(two()[0])
    host, port = frames.checked_address(peer.address)
    with socket.create_connection((host, port)) as connection:
        connection.sendall(frames._HELLO.pack(frames._MAGIC, 1, bytes(32)) + bytes(32))
        assert isinstance(peer.ended(), PeerError)


def test_a_secret_is_made_if_none_is_given() -> None:
    golden, mine = two(scaled(DOWN, 1.1))
    ready: queue.Queue[str] = queue.Queue()
    thread = threading.Thread(
        target=ld.lockstep_peer,
        args=(mine, "tcp://127.0.0.1:0", INPUTS),
        kwargs={"ready": ready.put},
    )
    thread.start()
    address, word, secret = ready.get(timeout=30).split()
    assert word == "secret"
    report = ld.lockstep(golden, address, INPUTS, secret=secret, progress=False)
    thread.join(30)
    assert report.findings[0].path == DOWN
