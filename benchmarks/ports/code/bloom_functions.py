"""BLOOM as functions over a dictionary of weights; heads come first, one sequence at a time.

Weights of linear layers are kept as [in, out]. The linear biases are written as distances from the
query, which is the same to softmax as Hugging Face's distances from the first token.
"""

import math

import torch
from torch import nn


def slopes_of(n):
    """The slopes of ALiBi for any number of heads."""

    def power_of_two(m):
        first = 2.0 ** (-8.0 / m)
        return [first ** (i + 1) for i in range(m)]

    m = 2 ** int(math.log2(n))
    more = power_of_two(2 * m)[0::2]
    return power_of_two(m) + more[: n - m]


def ln(w, name, x, eps):
    x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.addcmul(w[name + "_b"], x, w[name + "_g"])


def affine(w, name, x):
    return torch.addmm(w[name + "_b"], x, w[name + "_w"])


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))


def project(w, n, h):
    """[tokens, width] -> queries, keys and values, each [heads, tokens, channels]"""
    qkv = torch.einsum("ti,kihd->khtd", h, w[f"h{n}_qkv_w"]) + w[f"h{n}_qkv_b"][:, :, None]
    return qkv[0], qkv[1], qkv[2]


def attention(w, n, h, bias, past):
    q, k, v = project(w, n, h)
    if n in past:
        k = torch.cat([past[n][0], k], dim=1)
        v = torch.cat([past[n][1], v], dim=1)
    past[n] = (k, v)
    heads = []
    for i in range(q.shape[0]):
        score = q[i] @ k[i].T / math.sqrt(q.shape[-1]) + bias[i]
        heads.append(torch.softmax(score, dim=-1) @ v[i])
    return affine(w, f"h{n}_out", torch.cat(heads, dim=-1))


def biases(n_heads, start, new):
    """[heads, new, start + new]: minus the slope for each step back, minus infinity ahead."""
    query = torch.arange(start, start + new)
    back = query[:, None] - torch.arange(start + new)
    slopes = torch.tensor(slopes_of(n_heads))
    bias = -slopes[:, None, None] * back
    return bias.masked_fill(back < 0, -math.inf)


def forward(w, cfg, ids, past):
    """ids: [tokens]; past: what `attention` left there in earlier calls."""
    eps = cfg.layer_norm_epsilon
    start = past[0][0].shape[1] if past else 0
    bias = biases(cfg.n_head, start, len(ids)).to(w["emb"].dtype)
    x = w["emb"][ids]
    x = ln(w, "emb_ln", x, eps)
    for n in range(cfg.n_layer):
        h = ln(w, f"h{n}_ln1", x, eps)
        x = x + attention(w, n, h, bias, past)
        h = ln(w, f"h{n}_ln2", x, eps)
        h = gelu_new(affine(w, f"h{n}_up", h))
        x = x + affine(w, f"h{n}_down", h)
    x = ln(w, "ln_f", x, eps)
    return x @ w["emb"].T


class Bloom(nn.Module):
    """Holds the weights; all else is functions."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        width, heads = cfg.hidden_size, cfg.n_head
        shapes = {"emb": (cfg.vocab_size, width)}
        norms = ["emb_ln", "ln_f"]
        for n in range(cfg.n_layer):
            norms += [f"h{n}_ln1", f"h{n}_ln2"]
            shapes[f"h{n}_qkv_w"] = (3, width, heads, width // heads)
            shapes[f"h{n}_qkv_b"] = (3, heads, width // heads)
            for name, i, o in (("out", 1, 1), ("up", 1, 4), ("down", 4, 1)):
                shapes[f"h{n}_{name}_w"] = (i * width, o * width)
                shapes[f"h{n}_{name}_b"] = (o * width,)
        for name in norms:
            shapes[name + "_g"] = shapes[name + "_b"] = (width,)
        self.w = nn.ParameterDict({k: nn.Parameter(torch.empty(s)) for k, s in shapes.items()})

    def forward(self, ids, past):
        return forward(dict(self.w.items()), self.cfg, ids, past)


@torch.no_grad()
def run(model, ids, prompt):
    past = {}
    steps = [ids[0, :prompt], *ids[0, prompt:].split(1)]
    return [model(step, past) for step in steps]
