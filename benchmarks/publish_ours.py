"""Our side of `weight_sync`: an embedded stack as every user gets it, and a policy that is trained, published
and sampled. `python -m benchmarks.publish_ours …` does so for each line of its input; the time is the
client's, from PublishWeights to the completion of one token.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import opentinker as ot
from benchmarks.weight_sync import MODEL

PROMPT = tuple(range(100, 135))
ROWS = 4
RANK = 16


def train(policy: ot.Policy) -> None:
    """A step, so that there is something new to publish."""
    ids = (*PROMPT, *range(200, 212))
    mask = [0] * len(PROMPT) + [1] * 12
    rows = [ot.TrainSample(token_ids=ids, loss_mask=mask) for _ in range(ROWS)]
    policy.forward_backward(rows, ot.CrossEntropy()).result()
    policy.optim_step(ot.AdamW(lr=1e-4)).result()


def once(policy: ot.Policy) -> dict[str, float]:
    train(policy)
    begin = time.perf_counter()
    version = policy.publish().result().version
    published = time.perf_counter()
    (completion,) = policy.sample(PROMPT, ot.SamplingParams(max_tokens=1), seed=1).result()
    end = time.perf_counter()
    if completion.spans != ((0, 1, version),):
        raise RuntimeError(f"{completion.spans} answered instead of version {version}")
    return {"seconds": end - begin, "publish_s": published - begin, "first_token_s": end - published}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serving-mode", choices=("adapter", "merged"), required=True)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    inference = ot.ServerOptions(
        engine="vllm", dtype=arguments.dtype, serving_mode=arguments.serving_mode, context_tokens=1024
    )
    with (
        tempfile.TemporaryDirectory(prefix="ot-bench-") as directory,
        ot.connect(state_dir=Path(directory), progress=False) as cluster,
    ):
        policy = cluster.create_policy(MODEL, tuning=ot.LoRA(rank=RANK), inference=inference).result()
        answer: dict[str, object] = {"ready": True}
        while True:
            print(json.dumps(answer), flush=True)
            if not sys.stdin.readline():
                return 0
            answer = dict(once(policy))


if __name__ == "__main__":
    sys.exit(main())
