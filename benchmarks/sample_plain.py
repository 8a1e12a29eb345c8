"""What one would use instead of the service: vLLM's AsyncLLM, called in this process.

The engine is built with the arguments that the service gives its own, and each request asks for what the
service asks for: ids and the logprobs of the sampled tokens, from a seed. `python -m benchmarks.sample_plain
…` does the `sample_work.Work` of each line of its input.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sample_work import Work, first_tokens
from opentinker_inference.engine.vllm_engine import VllmEngine
from opentinker_inference.ports import EngineConfig


async def run(llm: Any, work: Work) -> dict[str, float]:
    """All requests at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA if work.stream else RequestOutputKind.FINAL_ONLY
    first: list[float] = []

    async def one(number: int) -> None:
        params = SamplingParams(
            n=work.n,
            max_tokens=work.new_tokens,
            temperature=1.0,
            seed=work.seed(number),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=kind,
        )
        prompt = {"prompt_token_ids": work.prompt(number)}
        counts: dict[int, int] = {}
        started = time.perf_counter()
        async for output in llm.generate(prompt, params, f"{work.line()}/{number}"):
            for completion in output.outputs:
                if completion.index not in counts:
                    first.append(time.perf_counter() - started)
                counts[completion.index] = counts.get(completion.index, 0) + len(completion.token_ids)
        if counts != dict.fromkeys(range(work.n), work.new_tokens):
            raise RuntimeError(f"completions have {counts} tokens instead of {work.new_tokens} each")

    begin = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(work.requests)))
    answer = {"seconds": time.perf_counter() - begin}
    return answer | (first_tokens(first) if work.stream else {})


async def serve(arguments: argparse.Namespace) -> None:
    """Start the engine, then a piece of work for each line."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    config = EngineConfig(
        "vllm", arguments.model_dir, arguments.context_tokens, serving_mode=arguments.serving_mode
    )
    engine = VllmEngine(config)
    engine._merged = arguments.serving_mode == "merged"
    llm = AsyncLLM.from_engine_args(engine._engine_args(bool(current_platform.is_cpu()), arguments.dtype))
    answer: dict[str, Any] = {"ready": True}
    try:
        while True:
            print(json.dumps(answer), flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                break
            answer = await run(llm, Work.of_line(line))
    finally:
        llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--serving-mode", choices=("adapter", "merged"), required=True)
    parser.add_argument("--context-tokens", type=int, default=1024)
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
