"""A program that knows nothing of llmdebug_nb; run by `test_vllm_itself.py`.

The engine runs in another process, as by default. A second argument: how many workers share it.
"""

import sys

from vllm import LLM, SamplingParams

from vllm_program import PROMPTS

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3,
        tensor_parallel_size=int(sys.argv[2]) if len(sys.argv) > 2 else 1,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
