"""Our side of `overhead`: `fit()` on the embedded stack over a recording; prints one JSON line a step.

The environment gives the recorded rewards, so that the rows are those of the baseline; everything else is
what every user gets.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import opentinker as ot
from benchmarks.recorded import Recording, load_recording, member_rewards
from opentinker.environments.base import Task


class Recorded(ot.Environment):
    """Shows a recorded prompt and pays the recorded rewards to the members of its group as they come."""

    max_turns: ClassVar[int] = 1
    splits: ClassVar[tuple[str, ...]] = ("train",)
    recording: ClassVar[Recording]
    paid: ClassVar[Counter[tuple[int, int]]] = Counter()

    def __init__(self) -> None:
        self._task: tuple[int, int] = (0, 0)

    def tasks(self, split: str) -> Sequence[Task] | None:
        prompts = type(self).recording.prompts
        return [
            {"step": step, "group": group} for step, row in enumerate(prompts) for group in range(len(row))
        ]

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self._task = (task["step"], task["group"])
        return ot.Observation(type(self).recording.prompts[task["step"]][task["group"]])

    def step(self, action: ot.Action) -> ot.StepResult:
        recording, (step, group) = type(self).recording, self._task
        rewards = member_rewards(recording.successes[step][group], recording.group_size)
        reward = rewards[self.paid[self._task]]
        self.paid[self._task] += 1
        return ot.StepResult(reward=reward, terminated=True)


class Lines(ot.Callback):
    """Prints the timings of each step."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        timings = {
            name.removeprefix("timing_s/"): value for name, value in metrics.items() if "timing_s/" in name
        }
        sys.stdout.write(json.dumps({"fit_step": step - 1, "rows": metrics.get("rows/trained"), **timings}))
        sys.stdout.write("\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--noop", action="store_true", help="engines that answer at once")
    arguments = parser.parse_args()
    recording = Recorded.recording = load_recording(arguments.recording)
    trainer = ot.ServerOptions(dtype=recording.trainer_dtype, context_tokens=recording.context_tokens)
    inference = ot.ServerOptions(
        engine="vllm",
        dtype=recording.sampler_dtype,
        serving_mode="merged",
        context_tokens=recording.context_tokens,
    )
    if arguments.noop:
        trainer = inference = ot.ServerOptions(engine="noop")
    with ot.connect(state_dir=arguments.work_dir / "state", progress=False) as cluster:
        ot.fit(
            env=Recorded,
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=recording.group_size, loss=ot.PPO(clip_high=0.28)),
            groups_per_step=recording.groups,
            steps=len(recording.prompts),
            learning_rate=2e-4,
            sampling=ot.SamplingParams(temperature=1.0, max_tokens=recording.new_tokens, ignore_eos=True),
            # No-op engines agree about nothing.
            logprob_check=not arguments.noop,
            split="train",
            shuffle=False,
            run_dir=arguments.work_dir / "run",
            callbacks=[Lines()],
            trainer=trainer,
            inference=inference,
            progress=False,
            cluster=cluster,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
