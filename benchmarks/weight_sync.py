"""How soon new weights are sampled, against doing it by hand. SmolLM2-135M, LoRA of rank 16, vLLM.

`merged`: from PublishWeights to the first token of the new version through the services of one host, over
merging the adapter, saving the merged model and reloading it into vLLM in one process. `adapter`: the same
where adapters are served beside the base, over saving the adapter and adding it to vLLM in one process.
`merged_float32` (reported): the first with a sampler in float32. Both sides end with the first token, which
beside the base takes longer than adding an adapter; the baseline's time without it is in `raw`, and so is how
ours divides into publishing and sampling.

A case may need more time than one run gives it; then the same command goes on (exit status 3 says so).
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from benchmarks.pairs import INFERENCE, TRAINER, Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result
from opentinker_inference.adapters.engine_process import engine_environment

MODEL = "smollm2-135m-instruct"
CASES = {
    "merged": ("merged", "bfloat16"),
    "adapter": ("adapter", "bfloat16"),
    "merged_float32": ("merged", "float32"),
}
DEFAULT_CASES = ("merged", "adapter")
BASELINES = {
    "merged": "one process: merge, save and reload into vLLM, sample a token",
    "adapter": "one process: save the adapter and add it to vLLM, sample a token",
}
MEASURED = tuple(dict.fromkeys((*TRAINER, *INFERENCE, "client/src", "services/scheduler/src")))


def run(options: Options) -> Iterable[Result]:
    from opentinker_kit.models import resolve_model

    model_dir = resolve_model(MODEL, model_roots=[]).path
    unknown = options.cases - CASES.keys()
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    cases = [case for case in CASES if case in (options.cases or DEFAULT_CASES)]
    for case in cases:
        yield _case(options, case, str(model_dir))
    forget("weight_sync", cases)


def _case(options: Options, case: str, model_dir: str) -> Result:
    mode, dtype = CASES[case]
    shared = ("--serving-mode", mode, "--dtype", dtype)
    started: dict[str, Program] = {}

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        ours = started["ours"] = stack.enter_context(Program("publish_ours", *shared))
        plain = Program("publish_plain", "--model-dir", model_dir, *shared, env=engine_environment("vllm"))
        theirs = started["baseline"] = stack.enter_context(plain)
        return lambda: ours.ask()["seconds"], lambda: theirs.ask()["seconds"]

    def parts() -> Mapping[str, object]:
        return {
            f"{name}_{figure}": value
            for name, program in started.items()
            for figure, value in program.ask().items()
            if figure != "seconds"
        }

    return measure(
        options,
        "weight_sync",
        case,
        sides,
        baseline=BASELINES[mode],
        work=1,
        unit="s",
        better="lower",
        extra=parts,
        measured=MEASURED,
    )
