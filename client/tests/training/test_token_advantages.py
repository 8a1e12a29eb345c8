"""Advantages with a number a token or turn: gaps, whitening, GAE, per-turn baselines; calling them all."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training.advantages import (
    AdvantageInputs,
    dr_grpo,
    estimate,
    gae,
    gpg,
    grpo,
    grpo_per_turn,
    needs_whole_batch,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    returns_to_go,
    whiten,
)

REWARDS = CASES["A1"]["inp"]["rewards"]
GROUPS = CASES["A1"]["inp"]["group"]
MASKS = [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]
AT_LAST = [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5]


def close(ours: Any, golden: Any) -> None:
    np.testing.assert_allclose(ours, golden, rtol=0, atol=1e-9)


def random_rows(seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Rewards, values and masks of ragged rows; a row may have no token of the policy."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 12, size=6)
    masks = [generator.integers(0, 2, size=size) for size in sizes]
    rewards = [generator.normal(size=size) * mask for size, mask in zip(sizes, masks, strict=True)]
    return rewards, [generator.normal(size=size) for size in sizes], masks


def test_returns_are_carried_over_gaps() -> None:
    """A13; B46: credit was lost over a tool's tokens."""
    golden = CASES["A13"]
    close(returns_to_go(AT_LAST, MASKS, gamma=0.9), golden["verl_carry"])
    close(reinforce_plus_plus(AT_LAST, MASKS, gamma=0.9, whitened=False), golden["verl_carry"])
    close(reinforce_plus_plus(AT_LAST, MASKS, gamma=0.9), golden["verl_adv"])
    assert abs(returns_to_go(AT_LAST, MASKS, gamma=0.9)[0][0] - golden["skyrl_zeroed"][0][0]) > 0.7
    dropped = returns_to_go(AT_LAST, MASKS, gamma=0.9, carry_over_gaps=False)[0]
    sampled = np.array(MASKS[0], dtype=bool)
    close(dropped[sampled], np.array(golden["skyrl_zeroed"][0])[sampled])


def test_gae_is_carried_over_gaps() -> None:
    """A15; B46."""
    golden = CASES["A15"]
    row = ([[0.0, 0.0, 0.0, 1.0]], [[0.5, 0.4, 9.0, 0.2]], [[1, 1, 0, 1]])
    ours = gae(*row, gamma=1.0, lam=0.95)
    close(ours.advantages, golden["carry_verl_NeMo_AReaL"])
    close(ours.returns, golden["returns_carry"])
    assert np.abs(ours.advantages[0] - golden["plain_SkyRL"][0]).max() > 8
    close(gae(*row, gamma=1.0, lam=0.95, carry_over_gaps=False).advantages, golden["plain_SkyRL"])


@pytest.mark.parametrize("seed", range(10))
def test_gaps_are_as_if_they_were_not_there(seed: int) -> None:
    """B46, for any gaps: the same rows with the gaps cut out, and GAE as its sum is defined."""
    rewards, values, masks = random_rows(seed)
    gamma, lam = 0.9, 0.8
    returns = returns_to_go(rewards, masks, gamma=gamma)
    estimates = gae(rewards, values, masks, gamma=gamma, lam=lam)
    for row, mask in enumerate(masks):
        kept = mask.astype(bool)
        r, v = rewards[row][kept], values[row][kept]
        n = len(r)
        expected = [sum(gamma ** (k - t) * r[k] for k in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(returns[row][kept], expected, atol=1e-12)
        delta = r + gamma * np.append(v[1:], 0.0)[:n] - v
        summed = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
        np.testing.assert_allclose(estimates.advantages[row][kept], summed, atol=1e-12)
        np.testing.assert_allclose(estimates.returns[row][kept], summed + v, atol=1e-12)


def test_a_reward_on_a_gap_is_for_the_token_before_it() -> None:
    on_gap = [[0.0, 0.0, 2.0, 0.0, 1.0]]
    moved = [[0.0, 2.0, 0.0, 0.0, 1.0]]
    mask = [[1, 1, 0, 1, 1]]
    values = [[0.1, 0.2, 0.0, 0.3, 0.4]]
    np.testing.assert_allclose(returns_to_go(on_gap, mask), returns_to_go(moved, mask))
    kept = np.array(mask[0], dtype=bool)
    np.testing.assert_allclose(
        gae(on_gap, values, mask).advantages[0][kept], gae(moved, values, mask).advantages[0][kept]
    )


def test_reinforce_plus_plus_baseline() -> None:
    """A14."""
    masks = [[1, 1, 1], *[[1]] * 7]
    rows = reinforce_plus_plus_baseline(REWARDS, GROUPS, masks)
    close([row[0] for row in rows], CASES["A14"]["out"])
    assert np.ptp(rows[0]) == 0
    plain = reinforce_plus_plus_baseline(REWARDS, GROUPS, masks, whitened=False)
    np.testing.assert_allclose([row[0] for row in plain], dr_grpo(REWARDS, GROUPS))
    without = reinforce_plus_plus_baseline([*REWARDS, None], [*GROUPS, 0], [*masks, [1, 1]])
    close([row[0] for row in without], [*CASES["A14"]["out"], 0.0])


def test_whitening_is_over_all_tokens_at_once() -> None:
    """B22: [2 x 3] is one set of six numbers, not two or three; B20: a part of a batch is not a batch."""
    rows, ones = [[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]], [[1, 1, 1], [1, 1, 1]]
    pooled = np.array(rows)
    expected = (pooled - pooled.mean()) / pooled.std(ddof=1)
    np.testing.assert_allclose(whiten(rows, ones), expected, atol=1e-7)
    split = [*whiten(rows[:1], ones[:1]), *whiten(rows[1:], ones[1:])]
    assert np.abs(np.array(split) - expected).max() > 0.5
    padded = whiten([[*row, np.nan, 7.0] for row in rows], [[*mask, 0, 0] for mask in ones])
    np.testing.assert_allclose([row[:3] for row in padded], expected, atol=1e-7)
    assert all(not row[3:].any() for row in padded)
    assert whiten([[5.0]], [[1]])[0].tolist() == [0.0]
    assert not np.concatenate(whiten([[0.1, 0.1], [0.1]], [[1, 1], [1]])).any()
    assert whiten([[1.0, 2.0]], [[0, 0]])[0].tolist() == [0.0, 0.0]
    assert whiten([], []) == []


def test_first_turns_as_baseline() -> None:
    """A17."""
    scores = [[0.2, 0.3, 1.0], [0.0, 0.5, 0.0]]
    close(grpo_per_turn(scores, [0, 0], baseline="first_turn"), CASES["A17"]["out"])


def test_turns_are_compared_with_the_same_turn_of_the_others() -> None:
    scores: Sequence[Sequence[float | None]] = [[0.2, 0.3, 1.0], [0.0, 0.5], [0.1, None, 0.0, 0.7], []]
    ours = grpo_per_turn(scores, ["a"] * 4)
    returns = np.array([[1.5, 1.3, 1.0], [0.5, 0.5, np.nan], [0.8, 0.7, 0.7]])
    for turn in range(3):
        column = returns[:, turn]
        present = np.flatnonzero(~np.isnan(column))
        expected = grpo(column[present].tolist(), ["a"] * len(present))
        np.testing.assert_allclose([ours[row][turn] for row in present], expected)
    assert ours[2][3] == 0.0  # nobody else came that far
    assert [len(row) for row in ours] == [3, 2, 4, 0]
    other_group = grpo_per_turn([*scores, [9.0, 9.0]], [*["a"] * 4, "b"])
    np.testing.assert_array_equal(other_group[0], ours[0])
    # Equal first turns say nothing, whatever comes later: no division by a std of 0.
    flat = grpo_per_turn([[0.0, 1.0], [1.0, 0.0]], ["a", "a"], baseline="first_turn")
    assert not np.concatenate(flat).any()
    raw = grpo_per_turn([[0.5, 0.2]], ["a"], baseline="first_turn", singleton="raw", eps=0.0)
    np.testing.assert_allclose(raw, [[0.7, 0.2]])


def test_rows_that_do_not_fit_are_refused_by_index() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"token_rewards\[1\]"):
        returns_to_go([[0.0], [0.0, 1.0]], [[1], [1]])
    with pytest.raises(errors.InvalidArgument, match=r"values\[0\]: is not finite"):
        gae([[0.0]], [[np.inf]], [[1]])
    with pytest.raises(errors.InvalidArgument, match=r"masks\[0\]"):
        whiten([[0.0]], [[2]])
    with pytest.raises(errors.InvalidArgument, match="1 masks for 2 rows"):
        whiten([[0.0], [0.0]], [[1]])
    with pytest.raises(errors.InvalidArgument, match="gamma"):
        returns_to_go([[0.0]], [[1]], gamma=1.5)
    with pytest.raises(errors.InvalidArgument, match="baseline"):
        grpo_per_turn([[0.0]], ["a"], baseline="last")  # type: ignore[arg-type]


INPUTS = AdvantageInputs(
    rewards=[1.0, 0.0],
    groups=["a", "a"],
    masks=[[0, 1, 1], [0, 1]],
    lengths=[2, 1],
    token_rewards=[[0.0, 0.0, 1.0], [0.0, 0.0]],
    turn_rewards=[[0.0, 1.0], [0.0]],
    values=[[0.0, 0.1, 0.2], [0.0, 0.3]],
)


def test_estimators_are_called_by_the_names_of_their_parameters() -> None:
    whole = estimate(partial(grpo, eps=1e-4), INPUTS)
    assert whole.per == "trajectory"
    np.testing.assert_allclose(np.concatenate(whole.advantages), grpo([1.0, 0.0], ["a", "a"], eps=1e-4))
    assert estimate(opo, INPUTS).per == "trajectory"
    tokens = estimate(partial(reinforce_plus_plus, gamma=0.5, whitened=False), INPUTS)
    assert tokens.per == "token"
    assert tokens.advantages[0].tolist() == [0.0, 0.5, 1.0]
    critic = estimate(gae, INPUTS)
    assert critic.returns is not None
    assert [len(row) for row in critic.returns] == [3, 2]
    turns = estimate(grpo_per_turn, INPUTS)
    assert turns.per == "turn"
    assert [len(row) for row in turns.advantages] == [2, 1]

    def own(rewards: Any, values: Any, lengths: Any = None, masks_of_nothing: int = 3) -> list[float]:
        return [value[1] + length for value, length in zip(values, lengths, strict=True)]

    assert [row.tolist() for row in estimate(own, INPUTS).advantages] == [[2.1], [1.3]]


def test_what_an_estimator_cannot_have_or_must_not_return() -> None:
    bare = AdvantageInputs(rewards=[1.0, 0.0], groups=["a", "a"])
    with pytest.raises(errors.InvalidArgument, match="gae needs token_rewards"):
        estimate(gae, bare)
    for wrong, problem in (
        (lambda rewards: [1.0], "2 numbers"),
        (lambda rewards: [1.0, np.nan], "not finite"),
        (lambda rewards, masks: [[1.0], [1.0, 2.0]], "one number a token"),
        (lambda rewards, turn_rewards: [[1.0], [1.0]], "one number a turn"),
        (lambda rewards, weather: rewards, "needs weather"),
    ):
        with pytest.raises(errors.InvalidArgument, match=problem):
            estimate(wrong, INPUTS)
    with pytest.raises(errors.InvalidArgument, match="no masks"):
        estimate(lambda rewards: [[1.0], [1.0]], bare)


def test_what_needs_the_whole_batch_says_so_and_only_that() -> None:
    """Streaming is refused for these: half of a batch gives them other values."""
    generator = np.random.default_rng(0)
    rewards = [1.0, 0.0, 0.0, 0.0, 3.0, 0.5]
    groups = ["a", "a", "b", "b", "b", "a"]
    masks = [generator.integers(0, 2, size=4) | np.array([1, 0, 0, 0]) for _ in rewards]

    def inputs(rows: list[int]) -> AdvantageInputs:
        return AdvantageInputs(
            rewards=[rewards[row] for row in rows],
            groups=[groups[row] for row in rows],
            masks=[masks[row] for row in rows],
            lengths=[row + 1 for row in rows],
            token_rewards=[masks[row] * rewards[row] for row in rows],
            turn_rewards=[[rewards[row], 1.0 * row] for row in rows],
            values=[masks[row] * 0.3 for row in rows],
        )

    own = [row for row, group in enumerate(groups) if group == "a"]

    def whole_first(rewards: Any, groups: Any) -> Any:
        return np.asarray(rewards) - np.mean(rewards)

    whole_first.needs_whole_batch = True  # type: ignore[attr-defined]
    for estimator in (
        grpo,
        dr_grpo,
        opo,
        gae,
        grpo_per_turn,
        partial(reinforce_plus_plus, whitened=False),
        partial(reinforce_plus_plus_baseline, whitened=False),
        gpg,
        reinforce_plus_plus,
        partial(reinforce_plus_plus_baseline, singleton="raw"),
        partial(partial(reinforce_plus_plus, whitened=False), whitened=True),
        whole_first,
    ):
        everything = estimate(estimator, inputs(list(range(6)))).advantages
        part = estimate(estimator, inputs(own)).advantages
        same = all(np.allclose(everything[row], part[i], atol=1e-9) for i, row in enumerate(own))
        assert needs_whole_batch(estimator) == (not same), estimator
