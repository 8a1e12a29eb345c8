"""Supervised fine-tuning: teach a small model short dialogues about sums and units, and watch held-out loss.

    python examples/sft_chats.py

The chats are made here from a fixed seed: 500 to learn from, 60 to measure with, no question in both.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import opentinker as ot

UNITS = (
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("kg", "g", 1000),
    ("h", "min", 60),
    ("min", "s", 60),
    ("weeks", "days", 7),
    ("dozen", "pieces", 12),
)
SYSTEM = "You are a careful calculator. Answer with one short sentence."


def question(random_: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    kind = random_.choice(("sum", "difference", "unit", "compare"))
    a, b = random_.randint(2, 60), random_.randint(2, 60)
    if kind == "sum":
        return f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    if kind == "difference":
        return f"What is {max(a, b)} minus {min(a, b)}?", f"{max(a, b)} minus {min(a, b)} is {abs(a - b)}."
    if kind == "unit":
        large, small, factor = random_.choice(UNITS)
        return f"How many {small} are {a} {large}?", f"{a} {large} are {a * factor} {small}."
    large, small, factor = random_.choice(UNITS)
    other = a * factor + random_.choice((-1, 1)) * b
    more = f"{a} {large}" if a * factor > other else f"{other} {small}"
    return f"Which is more, {a} {large} or {other} {small}?", f"{more} is more."


def chats(count: int, seed: int, taken: set[str]) -> list[dict[str, Any]]:
    """Dialogues of one to three questions, none of which is in `taken`; they are added to it."""
    random_ = random.Random(seed)
    made = []
    while len(made) < count:
        turns = [question(random_) for _ in range(random_.randint(1, 3))]
        asked = {text for text, _ in turns}
        if len(asked) < len(turns) or asked & taken:
            continue
        taken |= asked
        messages = [{"role": "system", "content": SYSTEM}]
        for text, answer in turns:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        made.append({"messages": messages})
    return made


def main() -> None:
    """Train, plot the losses, ask something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--chats", type=int, default=500)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/sft_chats"))
    arguments = parser.parse_args()
    taken: set[str] = set()
    held_out = chats(arguments.held_out, 1, taken)
    rows = chats(arguments.chats, 0, taken)
    with ot.connect():
        result = ot.sft(
            rows,
            arguments.model,
            tuning=ot.LoRA(rank=16),
            epochs=arguments.epochs,
            batch_size=arguments.batch_size,
            learning_rate=5e-4,
            warmup=5,
            decay="linear",
            evaluation=held_out,
            evaluation_every=10,
            seed=arguments.seed,
            name="sft-chats",
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
        plot = result.plot(arguments.out / "loss.png", "500 short chats, SmolLM2-135M-Instruct")
        before, after = result.evaluations[0][1], result.evaluations[-1][1]
        print(f"held-out loss {before.loss:.4f} -> {after.loss:.4f} in {result.steps} steps; saved {plot}")
        asked = held_out[0]["messages"][:2]
        # The job had a trainer slot only: this takes an inference slot, in a job of its own.
        reply = result.policy.chat(asked, ot.SamplingParams(temperature=0, max_tokens=24)).result()
        print(f"{asked[-1]['content']} {reply}")


if __name__ == "__main__":
    main()
