"""Rows and credit from trajectories: rewards at their places, filters on raw rewards, every grain."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import opentinker as ot
from opentinker import errors
from opentinker.environments.rewards import Reward
from opentinker.environments.types import EndReason
from opentinker.rollout.trajectory import Batch, Group, Segment, Trajectory, Turn
from opentinker.sampling.completion import StopReason
from opentinker.training.advantages import gae, grpo_per_turn, reinforce_plus_plus
from opentinker.training.episodes import credit, gather


def trajectory(
    group: str,
    member: int,
    reward: float | None,
    turns: list[tuple[int, float | None]],
    *,
    gap: int = 2,
    cut: bool = False,
    end: EndReason = EndReason.TERMINATED,
) -> Trajectory:
    """Turns are (sampled tokens, reward); between them the environment says `gap` tokens. `cut`: each turn is
    a segment of its own.
    """
    masks: list[list[int]] = [[0, 0]]
    for number, (count, _) in enumerate(turns):
        if number:
            masks = [*masks, [0, 0]] if cut else [*masks[:-1], masks[-1] + [0] * gap]
        masks[-1] += [1] * count
    return Trajectory(
        group=group,
        member=member,
        episode=f"{group}/{member}",
        segments=tuple(
            Segment(tuple(range(len(mask))), tuple(mask), np.full(len(mask), -0.5, dtype=np.float32), ())
            for mask in masks
        ),
        turns=tuple(Turn(0, count, "", StopReason.END, given) for count, given in turns),
        reward=Reward.of(reward) if reward is not None else Reward.unscored(),
        end_reason=end,
        temperature=1.0,
    )


def batch(*trajectories: Trajectory) -> Batch:
    groups: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        groups.setdefault(each.group, []).append(each)
    return Batch(
        0,
        0,
        tuple(Group(name, index, {}, 0, tuple(each)) for index, (name, each) in enumerate(groups.items())),
    )


def seen(estimator_inputs: dict[str, Any]) -> Any:
    """An estimator that keeps what it was given."""

    def estimator(rewards: Any, groups: Any, token_rewards: Any, turn_rewards: Any, masks: Any) -> Any:
        estimator_inputs.update(
            rewards=rewards, token_rewards=token_rewards, turn_rewards=turn_rewards, masks=masks
        )
        return np.zeros(len(rewards))

    return estimator


@pytest.mark.parametrize("cut", [False, True])
def test_rewards_stand_where_they_were_earned(cut: bool) -> None:
    """What turns earned at their last tokens, the rest of the episode's reward at its end."""
    given: dict[str, Any] = {}
    episodes = gather(batch(trajectory("a", 0, 1.5, [(2, 0.25), (1, None), (3, 0.5)], cut=cut)))
    credit(episodes, seen(given))
    (mask,), (tokens,) = given["masks"], given["token_rewards"]
    assert tokens[mask == 1].tolist() == [0, 0.25, 0, 0, 0, 1.25]
    assert not tokens[mask == 0].any()
    assert given["turn_rewards"] == [[0.25, None, 1.25]]
    assert given["rewards"] == [1.5]
    assert len(episodes.rows) == (3 if cut else 1)


def test_penalties_count_at_every_grain_alike() -> None:
    given: dict[str, Any] = {}
    episodes = gather(
        batch(trajectory("a", 0, 1.0, [(2, 0.5), (2, None)]), trajectory("a", 1, 0.0, [(1, None)]))
    )
    per_token = [-0.1 * np.arange(len(row.token_ids)) for row in episodes.rows]
    samples = credit(episodes, seen(given), bonus=[-0.3, 0.0], token_bonus=per_token)
    expected = 1.0 - 0.3 - 0.1 * (2 + 3 + 6 + 7)
    assert given["rewards"] == pytest.approx([expected, -0.2])
    assert [row.sum() for row in given["token_rewards"]] == pytest.approx([expected, -0.2])
    assert [sum(row) for row in given["turn_rewards"]] == pytest.approx([expected, -0.2])
    assert samples.metrics["critic/rewards/mean"] == pytest.approx((expected - 0.2) / 2)


def test_dropping_is_judged_on_raw_rewards() -> None:
    """B41: everybody is right, lengths differ: a group that length shaping makes vary teaches length only."""
    solved = [trajectory("solved", member, 1.0, [(2 + member, None)]) for member in range(3)]
    mixed = [trajectory("mixed", member, float(member), [(2, None)]) for member in range(2)]
    episodes = gather(batch(*solved, *mixed), "drop")
    assert {each.group for each in episodes.trajectories} == {"mixed"}
    shaped = credit(episodes, ot.advantages.grpo, bonus=[-0.1, -0.2])
    assert {row.group_id for row in shaped} == {"mixed"}
    assert shaped.metrics["group/zero_variance_fraction"] == 0.5
    kept = credit(gather(batch(*solved, *mixed)), ot.advantages.grpo)
    assert [row.inert for row in kept] == [True, True, True, False, False]


def test_a_truncated_turn_is_trained_where_it_was_sampled_only() -> None:
    """B29: a tool's text at the end of an episode that was cut off is no loss token, whatever cut it off."""
    cut_off = trajectory("a", 0, 0.0, [(2, None), (2, None)], end=EndReason.TOKEN_LIMIT)
    rows = ot.train_samples(batch(cut_off, trajectory("a", 1, 1.0, [(2, None)])))
    assert rows.loss_tokens == 6
    for row in rows:
        assert not np.asarray(row.advantages)[np.asarray(row.loss_mask) == 0].any()


def test_what_the_infrastructure_ended_leaves_its_group() -> None:
    lost = trajectory("a", 2, 1.0, [(2, None)], end=EndReason.SANDBOX_LOST)
    rows = ot.train_samples(
        batch(trajectory("a", 0, 0.0, [(2, None)]), trajectory("a", 1, 1.0, [(2, None)]), lost)
    )
    assert len(rows) == 2
    assert rows.metrics["rollout/excluded"] == 1
    np.testing.assert_allclose(rows[1].advantages, [0, 0, 0.70710578, 0.70710578], atol=1e-6)


@pytest.mark.parametrize("cut", [False, True])
def test_per_token_and_per_turn_estimates_meet_their_tokens(cut: bool) -> None:
    played = batch(
        trajectory("a", 0, 1.0, [(2, None), (1, 1.0)], cut=cut), trajectory("a", 1, 0.0, [(3, 0.0)], cut=cut)
    )
    rows = ot.train_samples(played, partial(reinforce_plus_plus, gamma=0.5, whitened=False))
    flat = np.concatenate([np.asarray(row.advantages)[np.asarray(row.loss_mask) == 1] for row in rows])
    np.testing.assert_allclose(flat, [0.25, 0.5, 1, 0, 0, 0])
    rows = ot.train_samples(played, grpo_per_turn)
    flat = np.concatenate([np.asarray(row.advantages)[np.asarray(row.loss_mask) == 1] for row in rows])
    np.testing.assert_allclose(flat, [0.7071058, 0.7071058, 0, *[-0.7071058] * 3], atol=1e-6)


def test_values_give_returns() -> None:
    """A15: credit is carried over what the environment said."""
    episodes = gather(batch(trajectory("a", 0, 1.0, [(2, 0.0), (1, 1.0)], gap=1)))
    values = [np.array([7, 7, 0.5, 0.4, 9, 0.2], dtype=np.float32)]
    (row,) = credit(episodes, partial(gae, lam=0.95), values=values)
    np.testing.assert_allclose(np.asarray(row.advantages)[2:], [0.432, 0.56, 0, 0.8], atol=1e-6)
    np.testing.assert_allclose(np.asarray(row.returns)[[2, 3, 5]], [0.932, 0.96, 1.0], atol=1e-6)
    np.testing.assert_allclose(np.asarray(row.old_values), values[0])


def test_an_estimator_of_ones_own() -> None:
    played = batch(trajectory("a", 0, 1.0, [(2, None)]), trajectory("b", 0, 3.0, [(1, None)]))
    rows = ot.train_samples(played, lambda rewards, lengths: np.asarray(rewards) * np.asarray(lengths))
    assert [float(np.max(row.advantages)) for row in rows] == [2.0, 3.0]
    with pytest.raises(errors.InvalidArgument, match="prompt"):
        ot.train_samples(played, lambda rewards, prompt: np.zeros(2))
    with pytest.raises(errors.InvalidArgument, match="values"):
        ot.train_samples(played, gae)
