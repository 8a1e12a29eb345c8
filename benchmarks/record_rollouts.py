"""Records what `overhead` replays: prompts and successes of a real run, from the middle of the demo.

python -m benchmarks.record_rollouts
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import opentinker as ot
from opentinker.environments.builtin.arithmetic import Arithmetic

SKIPPED = 15
STEPS = 12
OUT = Path(__file__).parent / "data" / "rollouts.json"


class Watched(Arithmetic):
    """Arithmetic that remembers what it asked and how often the answer was right, by seed."""

    asked: ClassVar[dict[int, str]] = {}
    right: ClassVar[Counter[int]] = Counter()

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self._seed = seed
        observation = super().reset(seed=seed, task=task)
        self.asked[seed] = observation.text
        return observation

    def step(self, action: ot.Action) -> ot.StepResult:
        result = super().step(action)
        self.right[self._seed] += int(result.reward.value == 1.0)
        return result


class Recorder(ot.Callback):
    """Takes each step's groups from the environment."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int]]] = []
        self._seen: set[int] = set()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        new = [seed for seed in Watched.asked if seed not in self._seen]
        self._seen.update(new)
        self.steps.append([(Watched.asked[seed], Watched.right[seed]) for seed in new])


def main() -> int:
    recorder = Recorder()
    with ot.connect(progress=True) as cluster:
        ot.fit(
            env=Watched,
            model="smollm2-135m-instruct",
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=8,
            steps=SKIPPED + STEPS,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(temperature=1.0, max_tokens=12),
            callbacks=[recorder],
            cluster=cluster,
        )
    kept = recorder.steps[SKIPPED:]
    recording = {
        "prompts": [[prompt for prompt, _ in groups] for groups in kept],
        "successes": [[right for _, right in groups] for groups in kept],
        "group_size": 8,
        "new_tokens": 12,
        "micro_batch_rows": 16,
        "sampler_dtype": "bfloat16",
        "trainer_dtype": "float32",
        "context_tokens": 512,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(recording, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
