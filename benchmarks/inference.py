"""How fast the service samples, against the same engine called in-process. SmolLM2-135M, vLLM, no adapter.

`inflight_64`, `inflight_256`: so many requests at once, prompts of 35 tokens, 64 new tokens each: output
tokens a second from the first byte of the first request to the last completion, over vLLM's AsyncLLM with the
same engine arguments, prompts, seeds and logprobs in a process of its own. `raw` has, beside the pairs, the
time to the first token of a stream when all of these requests come at once (median and 99th percentile), of
both sides.

A case may need more time than one run gives it; then the same command goes on (exit status 3 says so).
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from benchmarks.pairs import INFERENCE, Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result
from benchmarks.sample_work import MODEL, Side, Work
from opentinker_inference.adapters.engine_process import engine_environment, vllm_runs_on_cpu

IN_FLIGHT = {"inflight_64": 64, "inflight_256": 256}
PROMPT_TOKENS = 35
NEW_TOKENS = 64
STREAMED_TOKENS, STREAMED_REPETITIONS = 8, 3
DTYPE = "bfloat16"
BASELINE = "vLLM's AsyncLLM in-process: same engine arguments, prompts, seeds, logprobs"


def run(options: Options) -> Iterable[Result]:
    from opentinker_kit.models import resolve_model

    model_dir = resolve_model(MODEL, model_roots=[]).path
    unknown = options.cases - IN_FLIGHT.keys()
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    cases = [case for case in IN_FLIGHT if options.wants(case)]
    for case in cases:
        yield _case(options, case, str(model_dir))
    forget("inference", cases)


def _case(options: Options, case: str, model_dir: str) -> Result:
    work = Work(0, IN_FLIGHT[case], 1, PROMPT_TOKENS, NEW_TOKENS)
    mode = "merged" if vllm_runs_on_cpu() else "adapter"
    started: dict[str, Side] = {}

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        plain = ("--model-dir", model_dir, "--dtype", DTYPE, "--serving-mode", mode)
        ours = Program("sample_ours", "--dtype", DTYPE)
        started["ours"] = Side(stack.enter_context(ours), work)
        theirs = Program("sample_plain", *plain, env=engine_environment("vllm"))
        started["baseline"] = Side(stack.enter_context(theirs), work)
        return started["ours"].seconds, started["baseline"].seconds

    def first_tokens() -> dict[str, object]:
        found: dict[str, object] = {}
        for _ in range(STREAMED_REPETITIONS):
            for name, side in started.items():
                answer = side.first_tokens(STREAMED_TOKENS)
                for figure in ("first_token_p50_s", "first_token_p99_s"):
                    values = found.setdefault(f"{name}_{figure}", [])
                    assert isinstance(values, list)
                    values.append(answer[figure])
        return found

    return measure(
        options,
        "inference",
        case,
        sides,
        baseline=BASELINE,
        work=work.tokens,
        unit="tokens_per_s",
        extra=first_tokens,
        measured=INFERENCE,
    )
