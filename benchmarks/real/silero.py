"""Score the comparison on a trained detector of speech, which comes in three kinds of files.

    python benchmarks/real/silero.py [--modules] [--functions] [--only onnx,flat+*]

Golden is the network as modules with the names of its TorchScript, and with the weights from there;
mine is ONNX Runtime on the ONNX file, or modules of another shape with the weights of the
safetensors file (golden then has them too), right or with one bug. All listen to the same sound,
piece by piece. Grades are those of ``score.py``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import nn
from torch.nn import functional as F

import llmdebug_nb as ld
from real import checkpoint, score
from real.bugs import Bug, replaced, weight
from real.checkpoint import Model

PACKAGE = "silero_vad"
RATE, PIECE, CONTEXT, PIECES = 16_000, 512, 64, 3
BINS, WIDTH = 129, 128
CONVOLUTIONS = ((BINS, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))  # in, out, stride
FLAT = {
    "stft_conv.weight": "stft.forward_basis_buffer",
    "lstm_cell": "decoder.rnn",
    "final_conv": "decoder.decoder.2",
    **{f"conv{at + 1}": f"encoder.{at}.reparam_conv" for at in range(len(CONVOLUTIONS))},
}


def sound() -> torch.Tensor:
    """Return pieces of a voice, made up: a tone of 140 Hz with formants, and noise."""
    at = torch.arange(PIECES * PIECE + CONTEXT) / RATE
    tones = [
        torch.sin(2 * torch.pi * 140 * n * at) / (1 + abs(140 * n - formant) / 100)
        for n in range(1, 25)
        for formant in (600, 1700)
    ]
    noise = torch.randn(len(at), generator=torch.Generator().manual_seed(0))
    wave = 0.1 * sum(tones) + 0.003 * noise
    return wave.unfold(0, PIECE + CONTEXT, PIECE)[:, None]


# -- the network -----------------------------------------------------------------------------------


class STFT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padding = nn.ReflectionPad1d((0, CONTEXT))
        self.forward_basis_buffer = nn.Buffer(torch.empty(2 * BINS, 1, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv1d(self.padding(x).unsqueeze(1), self.forward_basis_buffer, stride=128)
        return torch.sqrt(x[:, :BINS] ** 2 + x[:, BINS:] ** 2)


class Block(nn.Module):
    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.reparam_conv = nn.Conv1d(given, made, 3, stride, padding=1)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.reparam_conv(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTMCell(WIDTH, WIDTH)
        self.decoder = nn.Sequential(
            nn.Dropout(0.1), nn.ReLU(), nn.Conv1d(WIDTH, 1, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = self.rnn(x.squeeze(-1), (state[0], state[1]))
        return self.decoder(h.unsqueeze(-1)), torch.stack((h, c))


class Detector(nn.Module):
    """The network with the names and the shape of its TorchScript."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = STFT()
        self.encoder = nn.Sequential(*(Block(*each) for each in CONVOLUTIONS))
        self.decoder = Decoder()

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, state = self.decoder(self.encoder(self.stft(x)), state)
        return x.squeeze(1).mean(1, keepdim=True), state


class Flat(nn.Module):
    """The network with the names of its safetensors, written anew."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * BINS, 256, 128, bias=False)
        for at, (given, made, stride) in enumerate(CONVOLUTIONS, 1):
            setattr(self, f"conv{at}", nn.Conv1d(given, made, 3, stride, padding=1))
        self.lstm_cell = nn.LSTMCell(WIDTH, WIDTH)
        self.final_conv = nn.Conv1d(WIDTH, 1, 1)

    def spectrum(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat((x, x[:, -CONTEXT - 1 : -1].flip(1)), 1)
        return torch.linalg.vector_norm(self.stft_conv(x[:, None]).unflatten(1, (2, BINS)), dim=1)

    def remember(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.lstm_cell(x, tuple(state)))

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        return self.final_conv(x.relu().unsqueeze(-1)).sigmoid().flatten(1)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.spectrum(x)
        for convolve in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = convolve(x).clamp(min=0)
        state = self.remember(x.squeeze(-1), state)
        return self.answer(state[0]), state


# -- its files -------------------------------------------------------------------------------------


def script() -> Any:
    """Return the network as TorchScript, the part for 16 kHz."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        return torch.jit.load(checkpoint.installed(PACKAGE) / "data" / "silero_vad.jit")._model


def flat_weights() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint.installed(PACKAGE) / "data" / "silero_vad_16k.safetensors")


def renamed(name: str) -> str:
    """Return the detector's name of a weight of the safetensors file."""
    if name in FLAT:
        return FLAT[name]
    module, _, last = name.rpartition(".")
    return f"{FLAT[module]}.{last}"


def detector(flat: bool = False) -> Model:
    """Return golden. ``flat``: with the weights of the safetensors file."""
    state = script().state_dict()
    if flat:
        state = {renamed(name): value for name, value in flat_weights().items()}
    return loaded(Detector(), state)


def flat() -> Model:
    return loaded(Flat(), flat_weights())


def loaded(model: nn.Module, state: dict[str, torch.Tensor]) -> Model:
    model.load_state_dict(state)
    return model.eval()


def session(optimised: bool = True) -> Any:
    """Return a session of ONNX Runtime on the ONNX file."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    path = checkpoint.installed(PACKAGE) / "data" / "silero_vad_16k_op15.onnx"
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def listen(program: Any) -> list[float]:
    """Return the likelihood of speech in each piece."""
    state, heard = torch.zeros(2, 1, WIDTH), []
    for piece in sound():
        if hasattr(program, "run"):
            feed = {
                "input": piece.numpy(),
                "state": state.numpy(),
                "sr": torch.tensor(RATE).numpy(),
            }
            likely, state = map(torch.from_numpy, program.run(None, feed))
        else:
            likely, state = program(piece, state)
        heard.append(float(likely))
    return heard


# -- bugs ------------------------------------------------------------------------------------------


class LastBins:
    def spectrum(self, x):
        x = torch.cat((x, x[:, -CONTEXT:].flip(1)), 1)  # wrong
        return torch.linalg.vector_norm(self.stft_conv(x[:, None]).unflatten(1, (2, BINS)), dim=1)


class Forgetful:
    def remember(self, x, state):
        return torch.stack(self.lstm_cell(x, (state[0], torch.zeros_like(state[1]))))  # wrong


class Unlimited:
    def answer(self, x):
        return self.final_conv(x.unsqueeze(-1)).sigmoid().flatten(1)  # wrong


def turned_gates(weight: torch.Tensor) -> None:
    weight[: 2 * WIDTH] = weight[: 2 * WIDTH].roll(WIDTH, 0)


BUGS = (
    replaced("reflected_twice", "padding repeats the last sample", "", LastBins),
    replaced("forgetful", "the cell's state is not kept", "", Forgetful),
    replaced("unlimited", "the last ReLU is missing", "", Unlimited, "decoder.decoder.1/*.relu"),
    weight("convolution", "one channel is 5 % larger", "conv2", lambda w: w[7].mul_(1.05)),
)


# -- cases -----------------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[], Any]] = {
    "onnx": session,
    "onnx_not_optimised": lambda: session(optimised=False),
    "flat": flat,
}


def record(program: Any, name: str, mode: str) -> ld.Run:
    score.forget(name)
    given: Any = {"tokens": "all", "mode": score.MODES[mode]}
    with ld.dump(program, name=name, path=score.OUT, **given) as made:
        listen(program)
    return made


@cache
def golden(flat: bool, mode: str) -> ld.Run:
    return record(detector(flat), f"silero-{'flat' if flat else 'script'}-{mode}", mode)


def ask(case: score.Case, bug: Bug | None) -> score.Mark:
    program = PROGRAMS[case.program]()
    if bug:
        bug.plant(program)
    base = golden(case.program == "flat", case.mode)
    return score.compared(case, base, record(program, "silero-mine", case.mode), bug)


def cases(modes: list[str]) -> Iterator[tuple[score.Case, Bug | None]]:
    for mode in modes:
        for name in PROGRAMS:
            yield score.Case(name, "", "fp32", mode), None
        for bug in BUGS:
            yield score.Case("flat", bug.name, "fp32", mode), bug


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for mode in score.MODES:
        parser.add_argument(f"--{mode}", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["*"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if why := checkpoint.missing(PACKAGE):
        raise SystemExit(why)
    modes = [mode for mode in score.MODES if getattr(given, mode)] or list(score.MODES)
    score.tell(
        [
            ask(case, bug)
            for case, bug in cases(modes)
            if any(fnmatchcase(case.name, glob) for glob in given.only)
        ]
    )


if __name__ == "__main__":
    main()
