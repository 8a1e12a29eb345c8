"""What a group of completions saves by sharing its prompt. SmolLM2-135M on the service, no adapter.

64 completions of 12 tokens: 8 prompts with 8 completions each, over 64 prompts with one each, all of the same
length, that no cache knows. `prompt_35`, `prompt_512`: the lengths, on vLLM. `prompt_35_transformers` and
`prompt_512_transformers` (reported): the same on the deterministic engine.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from benchmarks.pairs import INFERENCE, Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result
from benchmarks.sample_work import Side, Work

SAMPLES, GROUP = 64, 8
NEW_TOKENS = 12
CASES = {
    "prompt_35": ("vllm", 35),
    "prompt_512": ("vllm", 512),
    "prompt_35_transformers": ("transformers", 35),
    "prompt_512_transformers": ("transformers", 512),
}
DEFAULT_CASES = ("prompt_35", "prompt_512")
BASELINE = "64 distinct prompts of the same length, one completion each"


def run(options: Options) -> Iterable[Result]:
    unknown = options.cases - CASES.keys()
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    cases = [case for case in CASES if case in (options.cases or DEFAULT_CASES)]
    for case in cases:
        yield _case(options, case)
    forget("group", cases)


def _case(options: Options, case: str) -> Result:
    engine, tokens = CASES[case]
    shared = Work(0, SAMPLES // GROUP, GROUP, tokens, NEW_TOKENS)
    distinct = Work(0, SAMPLES, 1, tokens, NEW_TOKENS)

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        program = stack.enter_context(Program("sample_ours", "--engine", engine))
        return Side(program, shared).seconds, Side(program, distinct).seconds

    return measure(
        options,
        "group",
        case,
        sides,
        baseline=BASELINE,
        work=SAMPLES * NEW_TOKENS,
        unit="tokens_per_s",
        measured=INFERENCE,
    )
