"""Train an agent of several turns on a hosted environment, then play it, all in one call each.

python examples/guess_number.py
"""

import opentinker as ot

RANGE = {"low": 1, "high": 10}


def main() -> None:
    """Train, evaluate, play."""
    with ot.connect():
        result = ot.fit(
            env="guess_number",
            env_options=RANGE,
            model="smollm2-135m-instruct",
            tuning=ot.LoRA(rank=16),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=8,
            steps=30,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=6),
        )
        played = ot.run(result.policy, "guess_number", env_options=RANGE, episodes=50)
        print(f"found the number in {played.reward:.0%} of {played.episodes} episodes")
        for message in played.trajectories[0].messages:
            print(f"{message.role:>9}: {message.content.text}")


if __name__ == "__main__":
    main()
