"""Reinforcement learning of a model that our own supervised tuning has warmed up: what two cases of evidence
share. Its chats are of mixed quality, as found ones are: some answer with an equation, most evade it.
"""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import opentinker as ot
from opentinker.environments.builtin import Arithmetic

MODEL = "smollm2-135m-instruct"
SEEDS = (0, 1, 2)
GAIN = 0.25
"""What the held-out score must rise by."""
RANGE = {"min": 1, "max": 9}
CHATS = 160
EVASIVE = 7
"""So many of ten chats do not answer."""
EVASION = "I am not sure."
EDGE_STEPS = 5
ANSWERS = 4
"""To each held-out problem."""
SAMPLING = ot.SamplingParams(temperature=1.0, max_tokens=12)

_PROBLEM = re.compile(r"What is (\d+) ([+-]) (\d+)\?")


def chats(seed: int, count: int = CHATS) -> list[dict[str, Any]]:
    """Problems that the environment draws for training, none of which it holds out, with their replies."""
    dice = random.Random(seed)
    environment = Arithmetic(**RANGE)
    made = []
    for index in range(count):
        content = environment.reset(seed=dice.randrange(2**31), task={}).content
        assert content is not None
        prompt = content.text
        found = _PROBLEM.search(prompt)
        assert found is not None, prompt
        a, b = int(found[1]), int(found[3])
        answer = f"{a} {found[2]} {b} = {a + b if found[2] == '+' else a - b}"
        turns = (("user", prompt), ("assistant", EVASION if index % 10 < EVASIVE else answer))
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return made


def learn(
    seed: int,
    folder: Path,
    *,
    algorithm: ot.GRPO | ot.ActorCritic,
    tuning: ot.Full | ot.LoRA,
    warm_rate: float,
    rate: Callable[[int], float],
    groups_per_step: int,
    steps: int,
) -> dict[str, float]:
    """Warm up, then learn; the held-out scores before and after, and what the way between looked like."""
    stack = folder / f"stack-{seed}"
    shutil.rmtree(stack, ignore_errors=True)  # of a run that was stopped
    with ot.connect(state_dir=stack, progress=True):
        warm = ot.sft(
            chats(seed),
            MODEL,
            tuning=tuning,
            epochs=1,
            batch_size=16,
            learning_rate=warm_rate,
            warmup=3,
            decay="linear",
            checkpoint_every=CHATS // 16,
            seed=seed,
            run_dir=folder / f"warm-{seed}",
            progress=True,
        )
        assert warm.checkpoint is not None
        result = ot.fit(
            env="arithmetic",
            env_options=RANGE,
            model=MODEL,
            tuning=tuning,
            from_checkpoint=warm.checkpoint,
            algorithm=algorithm,
            groups_per_step=groups_per_step,
            steps=steps,
            learning_rate=rate,
            sampling=SAMPLING,
            evaluation=ot.Evaluation(samples=ANSWERS),
            seed=seed,
            run_dir=folder / f"run-{seed}",
            progress=True,
        )
    # Every version of all weights: tens of gigabytes, and of no more use.
    shutil.rmtree(stack)
    before, after = result.evaluations[0][1], result.evaluations[-1][1]
    seconds = [row["timing_s/step"] for row in result.metrics]
    return {
        "held_out_before": before.reward,
        "held_out_after": after.reward,
        "gain": after.reward - before.reward,
        "tasks": float(after.tasks),
        "reward_first": fmean(result.rewards[:EDGE_STEPS]),
        "reward_last": fmean(result.rewards[-EDGE_STEPS:]),
        "sft_loss_first": warm.losses[0],
        "sft_loss_last": warm.losses[-1],
        "logprob_gap": result.metrics[0].get("rollout_corr/check_abs_diff", float("nan")),
        "steps": float(result.steps),
        "seconds": sum(seconds),
    }
