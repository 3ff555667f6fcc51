"""What is done with a model: its prefill and decode steps, which give the logits of each call."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import torch

from ports.entry import Logits
from ports.weights import Model

DECODE = 3


def parts(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the prompt, all but the last three tokens, and each of these."""
    prompt = ids.shape[1] - DECODE
    return (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1))


def spans(ids: torch.Tensor) -> list[tuple[int, int]]:
    """Return where each of the parts begins and ends."""
    ends = range(ids.shape[1] - DECODE, ids.shape[1] + 1)
    return list(zip((0, *ends), ends, strict=False))


def decode(model: Model, ids: torch.Tensor, **given: int) -> Logits:
    """Prefill all but the last three tokens of a Hugging Face decoder, then feed them one by one.

    ``logits_to_keep``: so many of the last positions reach the head, as in `generate`.
    """
    logits, cache = [], None
    for part in parts(ids):
        out = model(part, past_key_values=cache, use_cache=True, **given)
        cache = out.past_key_values
        logits.append(out.logits)
    return logits


last_token = partial(decode, logits_to_keep=1)


def whole(model: Model, ids: torch.Tensor) -> Logits:
    """Give a Hugging Face model all tokens at once."""
    return [model(ids, use_cache=False).logits]


def translate(
    model: Model, source: torch.Tensor, target: torch.Tensor, visible: torch.Tensor | None = None
) -> Logits:
    """Encode the source, decode all of the target but three tokens at once, then one by one.

    ``visible``: 1 for each token of the source that is no padding.
    """
    given = {"use_cache": True} | ({} if visible is None else {"attention_mask": visible})
    prompt, *tokens = parts(target)
    out = model(input_ids=source, decoder_input_ids=prompt, **given)
    logits, given["encoder_outputs"] = [out.logits], (out.encoder_last_hidden_state,)
    for token in tokens:
        out = model(decoder_input_ids=token, past_key_values=out.past_key_values, **given)
        logits.append(out.logits)
    return logits


def code_of(model: Model) -> ModuleType:
    """Return the module of a port's code, which a bug may have changed."""
    return sys.modules[type(model).__module__]


def run(model: Model, *texts: torch.Tensor) -> Logits:
    """Run the port's own loop over the last text."""
    return list(code_of(model).run(model, *texts, texts[-1].shape[1] - DECODE))
