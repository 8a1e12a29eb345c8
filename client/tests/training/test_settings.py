"""Settings of algorithms that make no sense are refused by name, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.runs import train

import opentinker as ot
from opentinker import errors


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ot.GRPO(loss=ot.KL()), "no policy loss"),
        (lambda: ot.GRPO(advantage="ppo"), "one of grpo, dr_grpo"),
        (lambda: ot.GRPO(advantage=3), "a name or a function"),
        (lambda: ot.GRPO(advantage="rloo", eps=1e-4), "eps, ddof and singleton"),
        (lambda: ot.GRPO(ddof=2), "ddof"),
        (lambda: ot.GRPO(aggregation="mean"), "aggregation.*token_mean"),
        (lambda: ot.GRPO(aggregation_tokens=5), "aggregation_tokens"),
        (lambda: ot.GRPO(epochs=0), "epochs"),
        (lambda: ot.GRPO(mini_batches=0), "mini_batches"),
        (lambda: ot.GRPO(entropy_coefficient=-1), "entropy_coefficient"),
        (lambda: ot.GRPO(kl=0.1), "kl"),
        (
            lambda: ot.GRPO(off_policy_correction=ot.TIS(), loss=ot.PPO(correction=ot.TIS())),
            "correction already",
        ),
        (lambda: ot.GRPO(off_policy_correction=ot.TIS(), loss=ot.CrossEntropy()), "needs a policy loss"),
        (lambda: ot.KLPenalty("nowhere"), "where"),
        (lambda: ot.KLPenalty(coefficient=0), "coefficient"),
        (lambda: ot.KLPenalty(reference="base"), "must be a policy"),
        (lambda: ot.KLPenalty("reward", estimator="k3_straight_through"), "no gradient"),
        (lambda: ot.KLPenalty("reward", importance_weighted=True), "importance_weighted"),
        (lambda: ot.Overlong(0), "buffer_tokens"),
        (lambda: ot.Critic(clip=0), "clip"),
        (lambda: ot.Critic(shared=True, warmup=2), "warmup"),
        (lambda: ot.Critic(coefficient=0.1), "shared critic"),
        (lambda: ot.ActorCritic(gamma=1.5), "gamma"),
        (lambda: ot.ActorCritic(critic=None), "critic"),
    ],
)
def test_bad_settings_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        make()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kl": 0.1}, r"kl: is an option of the algorithm: fit\(algorithm=ot.GRPO\(kl="),
        ({"critic": True}, "ActorCritic"),
        ({"epochs": 2}, "algorithm"),
        ({"tuning": ot.LoRA(value_head=True)}, "trains no value head"),
        ({"logprob_check": 0}, "logprob_check"),
        ({"algorithm": ot.GRPO(aggregation="seq_mean_token_sum_norm")}, "aggregation_tokens"),
        ({"algorithm": ot.GRPO(overlong=ot.Overlong(3))}, "overlong"),
    ],
)
def test_settings_that_do_not_fit_together(doubles: World, tmp_path: Path, options: Any, said: str) -> None:
    sampling = ot.SamplingParams(max_tokens=None)
    algorithm = options.pop("algorithm", ot.GRPO())
    with pytest.raises(errors.InvalidArgument, match=said):
        train(doubles, tmp_path, algorithm, sampling=sampling, **options)
    assert not doubles.scheduler.jobs
