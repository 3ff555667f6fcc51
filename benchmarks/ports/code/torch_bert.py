"""BERT made of PyTorch's own encoder layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embeddings(nn.Module):
    """The sum of the embeddings of tokens, places and segments, normalised."""

    def __init__(self, vocabulary: int, width: int, places: int, segments: int, eps: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(places, width))
        self.segment = nn.Parameter(torch.zeros(segments, width))
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        x = self.token(ids)
        x = x + self.place[: ids.shape[1]]
        x = x + F.one_hot(segments, len(self.segment)).to(x.dtype) @ self.segment
        return self.norm(x)


class Encoder(nn.Module):
    """BERT with the head that predicts masked tokens.

    ``activation``: of the feed-forward layers. ``first``: norms come before, not after.
    """

    def __init__(self, config: Any, activation: str = "gelu", first: bool = False) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.embeddings = Embeddings(
            config.vocab_size, width, config.max_position_embeddings, config.type_vocab_size, eps
        )
        layer = nn.TransformerEncoderLayer(
            width,
            config.num_attention_heads,
            config.intermediate_size,
            dropout=0.0,
            activation=activation,
            layer_norm_eps=eps,
            batch_first=True,
            norm_first=first,
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_hidden_layers, enable_nested_tensor=False
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps))
        self.head = nn.Linear(width, config.vocab_size)

    def forward(self, ids: Tensor, segments: Tensor, visible: Tensor) -> Tensor:
        """Return logits, [1, tokens, vocabulary]. ``visible``: 1 for a token, 0 for padding."""
        x = self.embeddings(ids, segments)
        x = self.encoder(x, src_key_padding_mask=visible == 0)
        return self.head(self.transform(x))
