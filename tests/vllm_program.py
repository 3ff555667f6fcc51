"""Records a real vLLM engine; run by `test_vllm_itself.py` with a Python that has vLLM.

It prints a JSON object: what was generated with and without a recording, and the rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

PROMPTS = [[token * (k + 3) % 500 for token in range(10, 10 + n)] for k, n in enumerate((5, 23, 9))]


def checkpoint(folder: Path) -> LlamaForCausalLM:
    """Return a tiny model that lies in a folder as a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def main(folder: Path) -> dict[str, object]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    import torch
    from vllm import LLM, SamplingParams

    import llmdebug_nb as ld

    torch.manual_seed(0)
    model = checkpoint(folder / "model")
    llm = LLM(
        str(folder / "model"), skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3,
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=4, temperature=0, detokenize=False, ignore_eos=True, logprobs=3
    )

    def generated() -> list[list[object]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outs = llm.generate(prompts, sampling, use_tqdm=False)
        return [
            [
                list(out.token_ids),
                [{k: v.logprob for k, v in each.items()} for each in out.logprobs],
            ]
            for out in (one.outputs[0] for one in outs)
        ]

    plain = generated()
    with ld.dump(llm, name="engine", path=folder, tokens="all") as run:
        recorded = generated()
    rows = run.rows()
    with ld.dump(model, name="golden", path=folder, tokens="all"), torch.no_grad():
        for prompt, (tokens, _) in zip(PROMPTS, plain, strict=True):
            model(torch.tensor([[*prompt, *tokens]])[:, :-1])
    return {
        "same": plain == recorded,
        "tokens": [tokens for tokens, _ in recorded],
        "rows": rows[["request", "position", "token"]].values.tolist(),
        "modules": sorted({record.site.path for record in run.records()}),
        "problems": run.meta["problems"],
    }


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "result.json").write_text(json.dumps(main(where)))
