"""OLMoE in one file for inference: flat tokens, fused weights, one cache allocated for all layers.

Tokens are sorted by expert and padded to the largest load, so that one batched product serves all
experts.
"""

import torch
import torch.nn.functional as F
from torch import nn


def rms(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class OlmoeInference(nn.Module):
    def __init__(self, config, n_slots: int = 64) -> None:
        super().__init__()
        c = self.config = config
        L, D, E, W = c.num_hidden_layers, c.hidden_size, c.num_experts, c.intermediate_size
        self.n_q, self.n_kv = c.num_attention_heads, c.num_key_value_heads
        self.d = D // self.n_q
        self.eps, self.top_k = c.rms_norm_eps, c.num_experts_per_tok

        def weight(*shape):
            return nn.Parameter(torch.empty(shape), requires_grad=False)

        self.tok = weight(c.vocab_size, D)
        self.wqkv = weight(L, (self.n_q + 2 * self.n_kv) * self.d, D)
        self.q_gain = weight(L, self.n_q * self.d)
        self.k_gain = weight(L, self.n_kv * self.d)
        self.wo = weight(L, D, D)
        self.router = weight(L, E, D)
        self.w13 = weight(L, E, D, 2 * W)
        self.w2 = weight(L, E, W, D)
        self.gain_1, self.gain_2, self.gain = weight(L, D), weight(L, D), weight(D)
        self.out = weight(c.vocab_size, D)
        inv = c.rope_parameters["rope_theta"] ** -(torch.arange(0, self.d, 2) / self.d)
        self.angles = torch.arange(n_slots)[:, None] * inv[None]
        self.kv = torch.zeros(L, 2, n_slots, self.n_kv, self.d)

    def rope(self, x, at):
        cos, sin = self.angles[at, None].cos().to(x.dtype), self.angles[at, None].sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def attend(self, n, x, at):
        q, k, v = F.linear(x, self.wqkv[n]).split(
            [self.n_q * self.d, self.n_kv * self.d, self.n_kv * self.d], -1
        )
        q = rms(q, self.q_gain[n], self.eps)
        k = rms(k, self.k_gain[n], self.eps)
        q = self.rope(q.view(-1, self.n_q, self.d), at)
        self.kv[n, 0, at] = self.rope(k.view(-1, self.n_kv, self.d), at)
        self.kv[n, 1, at] = v.view(-1, self.n_kv, self.d)
        end = int(at[-1]) + 1
        keys, values = self.kv[n, 0, :end], self.kv[n, 1, :end]
        q = q.view(-1, self.n_kv, self.n_q // self.n_kv, self.d)
        scores = torch.einsum("tgqd,sgd->gqts", q, keys) / self.d**0.5
        scores = scores + torch.where(at[:, None] >= torch.arange(end), 0.0, float("-inf"))
        p = scores.float().softmax(-1).to(x.dtype)
        o = torch.einsum("gqts,sgd->tgqd", p, values)
        return F.linear(o.reshape(len(x), -1), self.wo[n])

    def experts(self, n, x):
        shares = F.linear(x, self.router[n]).float().softmax(-1)
        shares, chosen = shares.topk(self.top_k, -1)
        shares = shares.to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        expert = chosen.flatten()[order]
        load = torch.bincount(expert, minlength=self.w13.shape[1])
        place = torch.arange(len(order)) - (load.cumsum(0) - load)[expert]
        padded = x.new_zeros(len(load), int(load.max()), x.shape[1])
        padded[expert, place] = x[token]
        gate, up = torch.bmm(padded, self.w13[n]).chunk(2, -1)
        done = torch.bmm(F.silu(gate) * up, self.w2[n])
        done = done[expert, place] * shares.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, done)

    def forward(self, tokens, at):
        x = self.tok[tokens]
        for n in range(len(self.wo)):
            x = x + self.attend(n, rms(x, self.gain_1[n], self.eps), at)
            x = x + self.experts(n, rms(x, self.gain_2[n], self.eps))
        return F.linear(rms(x, self.gain, self.eps), self.out)


@torch.no_grad()
def run(model, ids, prompt: int):
    """Prefill ``prompt`` of the ids [1, length], feed the others one by one; return all logits."""
    model.kv = torch.zeros_like(model.kv, dtype=model.tok.dtype)
    logits = [model(ids[0, :prompt], torch.arange(prompt))]
    return logits + [
        model(ids[0, n : n + 1], torch.tensor([n])) for n in range(prompt, ids.shape[1])
    ]
