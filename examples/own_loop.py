"""The loop behind `fit()`, written out: GRPO on a small game, with the client's public pieces.

    python examples/own_loop.py --steps 20

Change any line: another advantage, another loss, samples from elsewhere. Everything below is awaited on this
script's own event loop; plain blocking code works as well (`cluster.wait(...)`).
"""

import argparse
import asyncio
import random
from statistics import fmean
from typing import Any

import opentinker as ot


class HigherDigit(ot.Environment):
    """Say a digit above the one that is shown."""

    max_turns = 1

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        self.shown = random.Random(seed).randint(0, 8)
        return ot.Observation(f"Say one digit that is higher than {self.shown}. Answer with the digit only.")

    def step(self, action: ot.Action) -> ot.StepResult:
        answer = action.text.strip()[:1]
        return ot.StepResult(reward=float(answer.isdecimal() and int(answer) > self.shown), terminated=True)


async def train(model: str, steps: int, engine: str | None, max_tokens: int) -> list[float]:
    """Train and return the mean reward of each step."""
    rewards: list[float] = []
    cluster = await asyncio.to_thread(ot.connect)
    async with cluster:
        inference = ot.ServerOptions(engine=engine)
        policy = await cluster.create_policy(model, tuning=ot.LoRA(rank=8), inference=inference)
        params = ot.SamplingParams(max_tokens=max_tokens)
        batches = ot.rollouts(policy, HigherDigit, groups=4, group_size=8, params=params, seed=1)
        for step in range(1, steps + 1):
            batch = await anext(batches)
            rewards.append(fmean(batch.rewards))
            samples = ot.train_samples(batch, advantage=ot.advantages.grpo)
            if samples.inert:
                print(f"step {step}: mean reward {rewards[-1]:.2f}, all groups equal, no step taken")
                continue
            # Three operations under way at once; the trainer runs them in this order.
            gradient = policy.forward_backward(samples, ot.PPO(), denominator=float(samples.loss_tokens))
            update = policy.optim_step(ot.AdamW(lr=2e-4, clip_norm=1.0))
            publication = policy.publish()
            _, stepped, version = await gradient, await update, await publication
            print(
                f"step {step}: mean reward {rewards[-1]:.2f}, gradient norm {stepped.grad_norm:.2f}, "
                f"version {version.version}"
            )
        print(await policy.chat([{"role": "user", "content": "Say one digit that is higher than 3."}]))
    return rewards


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--max-tokens", type=int, default=4)
    arguments = parser.parse_args()
    asyncio.run(train(arguments.model, arguments.steps, arguments.engine, arguments.max_tokens))


if __name__ == "__main__":
    main()
