"""Train an agent of several turns on a hosted environment, then play it: one call each.

python examples/guess_number.py
"""

import argparse

import opentinker as ot

RANGE = {"low": 1, "high": 10}


def main() -> None:
    """Train, play, show one episode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 episodes in each step")
    parser.add_argument("--episodes", type=int, default=50, help="how many to play after training")
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    arguments = parser.parse_args()
    with ot.connect():
        result = ot.fit(
            env="guess_number",
            env_options=RANGE,
            model=arguments.model,
            tuning=ot.LoRA(rank=16),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=6),
            inference=ot.ServerOptions(engine=arguments.engine),
        )
        played = ot.run(result.policy, "guess_number", env_options=RANGE, episodes=arguments.episodes)
    print(f"found the number in {played.reward:.0%} of {played.episodes} episodes")
    for message in played.trajectories[0].messages:
        print(f"{message.role:>9}: {message.content.text}")


if __name__ == "__main__":
    main()
