"""Records a vLLM engine that compiles its model; run by `test_vllm_itself.py`.

It writes a JSON object: what was generated with and without each recording, and what they say.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vllm_program import PROMPTS


def main(folder: Path, model: str) -> dict[str, object]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    import llmdebug_nb as ld

    llm = LLM(
        model, skip_tokenizer_init=True, dtype="float32", max_model_len=64,
        max_num_batched_tokens=16, max_num_seqs=3,
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=4, temperature=0, detokenize=False, ignore_eos=True, logprobs=3
    )

    def generated() -> list[object]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outs = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
        shares = [[{k: v.logprob for k, v in at.items()} for at in out.logprobs] for out in outs]
        return [[list(out.token_ids) for out in outs], shares]

    def recorded(name: str, **options: object) -> dict[str, object]:
        with ld.dump(llm, name=name, path=folder, tokens="all", **options) as run:
            now = generated()
        return {
            "same": now == plain, "tokens": now[0] == plain[0],
            "notes": run.meta.get("notes", []), "problems": run.meta["problems"],
            "paths": sorted({record.site.path for record in run.records()}),
        }  # fmt: skip

    plain = generated()
    found: dict[str, object] = {
        "outside": recorded("outside"),
        "both": recorded("kernels", graph="both"),
        "eager": recorded("eager", force_eager=True),
        "again": generated() == plain,
    }
    check = ld.opcheck(folder / "kernels", progress=False, output=folder).result
    found["opcheck"] = {
        "checked": check.checked, "total": check.total, "left": check.not_checked,
        "wrong": [str(each) for each in check.wrong],
    }  # fmt: skip
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    (where / "compiled.json").write_text(json.dumps(main(where, sys.argv[2])))
