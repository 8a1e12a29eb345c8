"""Full-parameter GRPO raises the held-out score of a policy that our own SFT warmed up by at least 0.25, with
each of three seeds.

SmolLM2-135M-Instruct, sums and differences of numbers up to 9: supervised tuning on 160 chats, of
which seven in ten evade the question, then reinforcement learning of all weights. Scores are means over the
environment's held-out problems, four answers each, sampled as in training.
"""

from functools import partial

import opentinker as ot
from scripts.evidence_cases import Progress
from scripts.warmed_up import GAIN, SEEDS, learn

STEPS = 30


def run(progress: Progress) -> dict[str, object]:
    seeds = {
        str(seed): progress.part(
            f"seed-{seed}",
            partial(
                learn,
                seed,
                progress.folder,
                algorithm=ot.GRPO(group_size=8),
                tuning=ot.Full(),
                warm_rate=5e-5,
                rate=ot.schedules.Linear(1.5e-5, STEPS, warmup=2),
                groups_per_step=8,
                steps=STEPS,
            ),
        )
        for seed in SEEDS
    }
    return {
        "seeds": seeds,
        "bounds": {"gain": f"at least {GAIN}"},
        "within": all(found["gain"] >= GAIN for found in seeds.values()),
    }
