"""A server's engine, which knows nothing of llmdebug_nb; run by `test_vllm_itself.py`.

It ends without a word to the engine, which is then killed.
"""

import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_program import PROMPTS

SAMPLING = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)


async def serve(llm: AsyncLLM, number: int) -> None:
    prompt = {"prompt_token_ids": PROMPTS[number]}
    async for _ in llm.generate(prompt, SAMPLING, request_id=f"request {number}"):
        pass


async def main() -> None:
    engine = AsyncEngineArgs(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
        max_model_len=64, max_num_batched_tokens=16, max_num_seqs=3,
    )  # fmt: skip
    llm = AsyncLLM.from_engine_args(engine)
    await asyncio.gather(*(serve(llm, number) for number in range(len(PROMPTS))))


if __name__ == "__main__":
    asyncio.run(main())
