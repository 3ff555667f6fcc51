"""An engine with vLLM's names: a scheduler's output, a runner, a model of flat tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn


class Logits(nn.Module):
    def forward(self, head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head.weight.T


class Model(nn.Module):
    """``input_ids``, ``positions``: int[tokens], or [batch, tokens]; its output has 8 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = (
            nn.Embedding(50, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 50, False),
        )
        self.logits_processor = Logits()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embed(input_ids)) + positions[..., None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.head, hidden)


class Whole(Model):
    """The model outside of an engine: its output is the logits of all tokens."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(input_ids, positions))


@dataclass
class New:
    req_id: str
    prompt_token_ids: list[int]
    num_computed_tokens: int = 0


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)


@dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)


class Runner:
    """``padding``: rows behind the last token."""

    def __init__(self, padding: int = 0) -> None:
        torch.manual_seed(0)
        self.model, self.padding = Model(), padding
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0)
        self.tokens: dict[str, list[int]] = {}

    def get_model(self) -> nn.Module:
        return self.model

    def dummy(self, rows: int) -> None:
        with torch.no_grad():
            self.model(input_ids=torch.zeros(rows).long(), positions=torch.arange(rows))

    def execute_model(self, scheduled: Scheduled, fails: bool = False) -> torch.Tensor | None:
        """Run a step; requests lie in the reverse order of the scheduler's."""
        cached = scheduled.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduled.scheduled_new_reqs:
            begins[new.req_id] = new.num_computed_tokens
            self.tokens[new.req_id] = list(new.prompt_token_ids)
        order = list(reversed(scheduled.num_scheduled_tokens))
        self.input_batch = SimpleNamespace(req_ids=[*order, "finished"], num_reqs=len(order))
        if not order:
            return None
        ids, positions = [], []
        for name in order:
            here = range(begins[name], begins[name] + scheduled.num_scheduled_tokens[name])
            positions += here
            ids += [self.tokens[name][at] for at in here]
        last = torch.tensor([scheduled.num_scheduled_tokens[name] for name in order]).cumsum(0) - 1
        ids, positions = ids + [0] * self.padding, positions + [0] * self.padding
        with torch.no_grad():
            hidden = self.model(input_ids=torch.tensor(ids), positions=torch.tensor(positions))
            if fails:
                raise RuntimeError("the device is lost")
            self.logits = self.model.compute_logits(hidden[last])
        for name, row in zip(order, self.logits, strict=True):
            self.tokens[name].append(int(row.argmax()))
        return self.logits

    def sample_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a prompt."""
        with torch.no_grad():
            return self.model.compute_logits(hidden)


class LLM:
    def __init__(self, runner: Runner) -> None:
        worker = SimpleNamespace(model_runner=runner)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        self.runner = runner

    def generate(self, steps: Sequence[Scheduled]) -> list[torch.Tensor | None]:
        return [self.runner.execute_model(step) for step in steps]


def installed(monkeypatch: pytest.MonkeyPatch, release: str = "0.99") -> None:
    """Let this module be vLLM for as long as a test runs."""
    package, entry = ModuleType("vllm"), ModuleType("vllm.entrypoints.llm")
    package.__version__, entry.LLM = release, LLM
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.llm", entry)


def served() -> list[Scheduled]:
    """Return the steps of two requests: b's prompt comes in two chunks, then both decode."""
    a, b = New("a", [1, 2, 3]), New("b", [4, 5, 6, 7, 8])
    return [
        Scheduled({"a": 3, "b": 2}, [a, b]),
        Scheduled({"a": 1, "b": 3}, [], Cached(["a", "b"], [3, 2])),
        Scheduled({"b": 1, "a": 1}, [], Cached(["b", "a"], [5, 4])),
    ]
