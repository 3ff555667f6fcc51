"""What a difference can cause, and what to do about it.

Rules are tried in order; the first whose section and name (a glob, in lower case) fit counts. The
names are those of settings, which are the same for all models; none is of a model or module.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from llmdebug_nb.core.setups import Level


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a difference."""

    level: Level
    can: str
    do: str


_FROM_CHECKPOINT = "use the config.json of the checkpoint"
_ROUNDING = "other kernels or another order of sums: differences of the size of rounding"
_TOKENS = "other tokens go in: everything differs from the first layer on"
_RULES: tuple[tuple[str, str, Known], ...] = (
    ("tokenizer", "chat template*", Known(
        "high", "other prompts for the same messages", "use one template in both")),
    ("tokenizer", "ids*", Known("high", _TOKENS, "compare tokenizer.json, BOS and normalisation")),
    ("tokenizer", "class", Known("low", "a fast and a slow tokenizer differ at the edges",
                                 "compare ids of the same text")),
    ("tokenizer", "padding*", Known(
        "medium", "batches are padded on the other side: positions move", "set padding_side")),
    ("tokenizer", "*", Known("medium", _TOKENS, "use the tokenizer of the checkpoint")),
    ("prompt", "*", Known("high", _TOKENS, "print both ids: BOS, chat template, padding")),
    ("config", "*rope*", Known("high", "queries and keys turn by other angles: errors grow with"
                               " the position", _FROM_CHECKPOINT)),
    ("config", "*eps*", Known("high", "every norm is off by a little", _FROM_CHECKPOINT)),
    ("config", "*window*", Known(
        "high", "attention sees other tokens, once the prompt is long", _FROM_CHECKPOINT)),
    ("config", "*act*", Known("high", "another activation in every layer", _FROM_CHECKPOINT)),
    ("config", "*scal*", Known("high", "values are scaled otherwise", _FROM_CHECKPOINT)),
    ("config", "*softcap*", Known(
        "high", "logits or scores are capped otherwise", _FROM_CHECKPOINT)),
    ("config", "*tie*", Known(
        "high", "the head has other weights than the embedding", "tie or untie as the checkpoint")),
    ("config", "*quant*", Known("high", "weights or activations are rounded to other steps",
                                "compare with an unquantised run first")),
    ("config", "num_*", Known("high", "another architecture", _FROM_CHECKPOINT)),
    ("config", "*_size", Known("high", "another architecture; a larger vocabulary may be padding",
                               _FROM_CHECKPOINT)),
    ("config", "*head_dim*", Known("high", "another architecture", _FROM_CHECKPOINT)),
    ("config", "*bias*", Known("high", "biases are missing or new", _FROM_CHECKPOINT)),
    ("config", "*token_id", Known("medium", "generation begins or ends at other tokens",
                                  "use the ids of the checkpoint")),
    ("config", "*dropout*", Known("medium", "in training mode, other values are dropped",
                                  "call model.eval(), or set both alike")),
    ("config", "*dtype", Known("medium", "another precision throughout",
                               "compare in one dtype first")),
    *(("config", name, Known("low", "none in the forward pass, as a rule", ""))
      for name in ("*version*", "*name_or_path", "architectures", "model_type", "use_cache",
                   "output_*", "return_*", "id2label*", "label2id*", "problem_type",
                   "is_encoder_decoder", "chunk_size*")),
    ("config", "*", Known("medium", "the model may compute something else", _FROM_CHECKPOINT)),
    ("generation", "*version*", Known("low", "none", "")),
    ("generation", "*", Known("medium", "other tokens are chosen from the same logits",
                              "pass the same generation options; greedy: do_sample=False")),
    ("weights", "values*", Known("high", "a stale or wrongly converted weight",
                                 "load the checkpoint again, and compare this tensor")),
    ("weights", "shape*", Known("high", "another architecture, a slice or a transpose",
                                "compare the config")),
    ("weights", "missing in the gguf*", Known(
        "high", "llama.cpp goes without them, or does not load the file", "convert again")),
    ("weights", "unexpected in the gguf*", Known(
        "high", "llama.cpp takes what the checkpoint has not", "convert again")),
    ("weights", "missing*", Known("high", "they keep random or old values",
                                  "look at the loader's list of missing keys")),
    ("weights", "unexpected*", Known("high", "the checkpoint's values are not used",
                                     "look at the loader's list of unexpected keys")),
    ("weights", "dtype*", Known("medium", "another precision in this weight",
                                "compare in one dtype first")),
    ("weights", "tied*", Known("high", "a head or embedding with values of its own",
                               "tie or untie as the checkpoint")),
    ("weights", "*", Known("medium", "one program has weights that the other lacks",
                           "compare the architectures")),
    ("modules", "*", Known("medium", "another implementation at this place",
                           "compare both sources; llmdebug compare names the line")),
    ("model", "attention", Known("medium", "other kernels: rounding; and masks or windows that one"
                                 " of them ignores", "set attn_implementation in both")),
    ("model", "training mode", Known("high", "dropout is on", "call model.eval()")),
    ("model", "dtypes*", Known("medium", "another precision throughout",
                               "compare in one dtype first")),
    ("model", "tied*", Known("high", "a head or embedding with values of its own",
                             "tie or untie as the checkpoint")),
    ("model", "devices", Known("low", _ROUNDING, "")),
    ("model", "*", Known("low", "another implementation", "")),
    ("switches", "tf32*", Known("medium", "float32 products keep 10 bits: relative errors of 1e-3",
                                "switch TF32 off in both")),
    ("switches", "float32*", Known("medium", "float32 products keep fewer bits: relative errors of"
                                   " 1e-3", "torch.set_float32_matmul_precision('highest')")),
    ("switches", "autocast*", Known("medium", "some operators compute in a narrower dtype",
                                    "use autocast in both or in none")),
    ("switches", "reduced*", Known("medium", "sums in half precision", "set both alike")),
    ("switches", "default dtype", Known("medium", "constants and new tensors have another"
                                        " precision", "set both alike")),
    ("switches", "*", Known("low", _ROUNDING, "")),
    ("random", "*", Known("low", "sampling and dropout draw other numbers",
                          "seed both alike (--seed), or decode greedily")),
    ("versions", "transformers", Known("medium", "code and defaults of a model may have changed",
                                       "use one version")),
    ("versions", "torch", Known("medium", _ROUNDING + "; defaults may have changed",
                                "use one version")),
    ("versions", "*", Known("low", _ROUNDING, "")),
)  # fmt: skip
_UNKNOWN = Known("medium", "unknown", "")


def known(section: str, name: str) -> Known:
    """Return what is known of a difference."""
    setting = name.rpartition(": ")[2]  # without the class of a further model
    names = [each.lower() for each in (name, setting, setting.rpartition(".")[2])]
    fitting = (
        found
        for at, glob, found in _RULES
        if at == section and any(fnmatchcase(each, glob) for each in names)
    )
    return next(fitting, _UNKNOWN)
