"""Preference training (DPO) from the client's public pieces, with numpy only.

    python examples/dpo.py --steps 20

A pair has a prompt, a chosen and a rejected answer. With s the logprob of an answer under the policy, r under
the reference (the model without its adapter), and margin = (s_chosen - r_chosen) - (s_rejected - r_rejected),
the loss of a pair is -log sigmoid(beta * margin) (Rafailov et al. 2023, equation 7).

Two passes: `forward` gives the logprobs, the loss is differentiated here, and `forward_backward` takes the
derivatives as weights of a cross entropy, which is -weight * logprob for each token. So any loss of sequence
logprobs can be written in a few lines, and the trainer needs to know nothing of it.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import opentinker as ot

Array = NDArray[np.float64]


def pairs(count: int, seed: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(chosen, rejected) conversations: a terse answer is preferred to a chatty one."""
    random_ = random.Random(seed)
    made = []
    for _ in range(count):
        a, b = random_.randint(2, 50), random_.randint(2, 50)
        asked = {"role": "user", "content": f"What is {a} plus {b}?"}
        terse, chatty = f"{a + b}", f"Great question! Let me think. The answer is {a + b}, I hope that helps!"
        made.append(
            (
                {"messages": [asked, {"role": "assistant", "content": terse}]},
                {"messages": [asked, {"role": "assistant", "content": chatty}]},
            )
        )
    return made


def sequence_logprobs(samples: Sequence[ot.TrainSample], logprobs: Sequence[Any]) -> Array:
    """[n]: the sum over the answer's tokens, end token included."""
    return np.array(
        [
            np.asarray(values, dtype=np.float64)[np.asarray(sample.loss_mask, dtype=bool)].sum()
            for sample, values in zip(samples, logprobs, strict=True)
        ]
    )


def dpo(policy: Array, reference: Array, beta: float) -> tuple[Array, Array, Array]:
    """Loss [pairs], margin [pairs], d loss / d policy logprob [rows]; rows are chosen, rejected, chosen …"""
    ratio = policy - reference
    margin = ratio[0::2] - ratio[1::2]
    loss = np.logaddexp(0.0, -beta * margin)
    slope = -beta / (1.0 + np.exp(beta * margin))
    return loss, margin, np.stack([slope, -slope], axis=1).ravel()


async def train(arguments: argparse.Namespace) -> list[float]:
    """Train; the mean loss of each step."""
    losses: list[float] = []
    cluster = await asyncio.to_thread(ot.connect)
    async with cluster:
        policy = await cluster.create_policy(arguments.model, tuning=ot.LoRA(rank=8), serve=False)
        tokenizer = await policy.tokenizer()
        rows = [row for pair in pairs(arguments.pairs, arguments.seed) for row in pair]
        samples = ot.supervised_samples(rows, tokenizer, max_tokens=512, train_on="last")
        reference = sequence_logprobs(samples, (await policy.forward(samples, base_model=True)).logprobs)
        random_ = random.Random(arguments.seed)
        for step in range(1, arguments.steps + 1):
            drawn = random_.sample(range(arguments.pairs), min(arguments.batch, arguments.pairs))
            places = [place for pair in drawn for place in (2 * pair, 2 * pair + 1)]
            batch = [samples[place] for place in places]
            current = sequence_logprobs(batch, (await policy.forward(batch)).logprobs)
            loss, margin, slope = dpo(current, reference[places], arguments.beta)
            weighted = [
                replace(sample, weights=np.full(len(sample.token_ids), -derivative, dtype=np.float32))
                for sample, derivative in zip(batch, slope, strict=True)
            ]
            gradient = policy.forward_backward(weighted, ot.CrossEntropy(), denominator=float(len(drawn)))
            update = policy.optim_step(ot.AdamW(lr=arguments.learning_rate, clip_norm=1.0))
            await gradient
            stepped = await update
            losses.append(float(loss.mean()))
            print(
                f"step {step}: loss {losses[-1]:.4f}, margin {margin.mean():+.3f}, "
                f"chosen preferred {np.mean(margin > 0):.0%}, gradient norm {stepped.grad_norm:.2f}"
            )
    return losses


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    losses = asyncio.run(train(parser.parse_args()))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
