"""MPT for a server with flat tokens and pages of keys and values, against Hugging Face's."""

from __future__ import annotations

from ports.made import written
from ports.weights import Model, State, each, norms_of, renamed, turned

HEADS = 6  # not a power of two
SETTINGS = {
    "vocab_size": 512, "d_model": 48, "n_layers": 3, "n_heads": HEADS, "max_seq_len": 64,
    "attn_config": {"clip_qkv": 1.5}, "initializer_range": 0.15, "attn_implementation": "eager",
}  # fmt: skip
NAMES = {
    "embed": "transformer.wte",
    "ln": "transformer.norm_f",
    "blocks.*.{ln1,ln2}": "transformer.blocks.*.{norm_1,norm_2}",
    "blocks.*.attn.{qkv,proj}": "transformer.blocks.*.attn.{Wqkv,out_proj}",
    "blocks.*.mlp.{fc1,fc2}": "transformer.blocks.*.ffn.{up_proj,down_proj}",
}
# the head is the embedding too
norms = norms_of("transformer.blocks", {"norm_1": "attn.Wqkv", "norm_2": "ffn.up_proj"})


def convert(hf: Model) -> State:
    """Return the weights, with the rows of all queries, all keys, all values sorted by head."""
    state = renamed(hf.state_dict(), NAMES)
    each(lambda rows: turned(rows, 3, HEADS), "blocks.*.attn.qkv")(state)
    return state


BLOCK = "transformer.blocks.*"
ATTENTION = ("blocks.*.attn", f"{BLOCK}.attn")
BUGS = r"""
slopes_in_order: the slopes of ALiBi are the steepest ones in order
    -     if power != heads:
    -         ladder = torch.cat((ladder[1::2], ladder[0::2]))
    in transformer $ATTENTION
    also return ladder[:heads]
    early
no_bias_in_decoding: while decoding, the scores get no bias
    -             scores = scores - self.slopes * torch.arange(length - 1, -1, -1)
    in $ATTENTION
    golden $BLOCK.attn/Tensor.add
    also parts.append(scores.softmax
not_clipped: queries, keys and values are not clipped
    -         fused = fused.clamp(-self.clip, self.clip)
    in $ATTENTION
    golden $BLOCK.attn/Tensor.clamp
    also pages.write(k, v
    also q = q * self.dim**-0.5
page_turned_early: the last token of a page is written to the next page
    - self.tables[n, at // PAGE]
    + self.tables[n, (at + 1) // PAGE]
    in (root) $ATTENTION
    also self.keys[page, :, :, place] = k
    also self.values[page, place] = v
    also k = self.keys[some]
    also v = self.values[some]
    also scores = (q[n, :, None] @ k)
residual_after_norm: the residual of the MLP is taken after the norm
    - return x + self.mlp(h)
    + return h + self.mlp(h)
    in blocks.* $BLOCK.ffn $BLOCK
kinds_first: the converter leaves the fused rows as all queries, all keys, all values
    weights each(lambda w: turned(w, 6, 3), "blocks.*.attn.qkv")
    in blocks.*.attn.qkv $BLOCK.attn.Wqkv
"""
PORTS = (written(globals(), "alibi", "Server", "MptForCausalLM", length=19),)
