"""GRPO advantages against the reference values, and the ways in which others got them wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker import errors
from opentinker.training.advantages import grpo

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "rl_reference.json").read_text())[
    "cases"
]
REWARDS = CASES["A1"]["values"]["inp"]["rewards"]
GROUPS = CASES["A1"]["values"]["inp"]["group"]


@pytest.mark.parametrize(
    ("case", "options"),
    [("A1", {}), ("A2", {"eps": 1e-4}), ("A3", {"ddof": 0}), ("A4", {"eps": 1e-9})],
)
def test_reference_values(case: str, options: dict[str, Any]) -> None:
    np.testing.assert_allclose(grpo(REWARDS, GROUPS, **options), CASES[case]["values"]["out"], atol=1e-11)


def test_groups_are_formed_by_id_not_by_position() -> None:
    """B34: a ragged batch; B37: the same number in two environments is two groups."""
    order = [3, 0, 7, 1, 4, 2, 6, 5]
    shuffled = grpo([REWARDS[i] for i in order], [GROUPS[i] for i in order])
    np.testing.assert_array_equal(shuffled, grpo(REWARDS, GROUPS)[order])
    constant = grpo([0.0, 1.0, 2.0, 3.0] * 2, ["a", "b", "c", "d"] * 2)
    np.testing.assert_array_equal(constant, np.zeros(8))
    two = grpo([0.0, 1.0, 5.0, 6.0], [("math", 0), ("math", 0), ("games", 0), ("games", 0)])
    np.testing.assert_allclose(two, [-0.7071058, 0.7071058, -0.7071058, 0.7071058], atol=1e-6)


def test_a_group_of_one_is_zero_or_raw_never_nan() -> None:
    """B36; A8."""
    reward = 0.7
    assert grpo([reward], ["a"]).tolist() == [0.0]
    assert grpo([reward], ["a"], singleton="raw").tolist() == [reward]
    assert not np.isnan(grpo([reward], ["a"])).any()
    assert CASES["A8"]["values"]["out"]["torchforge (torch.std n=1)"] == "nan"  # what a rival gives


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1, -7.3, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_groups_have_no_advantage(reward: float, dtype: type) -> None:
    """B33: rounding noise is no credit."""
    rewards = np.full(8, reward, dtype=dtype)
    noisy = rewards.copy()
    noisy[3] = np.nextafter(np.float32(reward), np.float32(np.inf))
    assert not grpo(rewards.tolist(), ["a"] * 8).any()
    assert not grpo(noisy.tolist(), ["a"] * 8).any()


def test_small_differences_keep_their_scale() -> None:
    """B26: large rewards that differ by little."""
    exact = grpo([1000.0, 1000.001] * 4, ["a"] * 8)
    single = grpo(np.array([1000.0, 1000.001] * 4, dtype=np.float32).tolist(), ["a"] * 8)
    np.testing.assert_allclose(single, exact, rtol=2e-3)
    assert abs(exact[0]) > 0.9


def test_nearly_constant_groups_stay_bounded() -> None:
    """B32."""
    values = grpo(np.array([0.3] * 7 + [1.0], dtype=np.float32).tolist(), ["a"] * 8)
    assert np.isfinite(values).all()
    assert np.abs(values).max() < 10


def test_a_missing_reward_is_not_zero() -> None:
    """B38: 0.0 is a reward, None is none."""
    with_zero = grpo([0.0, 1.0], ["a", "a"])
    with_missing = grpo([None, 1.0, 0.0], ["a", "a", "a"])
    assert with_zero[0] < 0
    assert with_missing[0] == 0.0
    np.testing.assert_allclose(with_missing[1:], with_zero[::-1])


def test_what_is_not_finite_is_refused_by_index() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"rewards\[1\]"):
        grpo([1.0, float("nan")], ["a", "a"])
    with pytest.raises(ValueError, match="2 rewards"):
        grpo([1.0, 0.0], ["a"])
    with pytest.raises(errors.InvalidArgument, match="ddof"):
        grpo([1.0, 0.0], ["a", "a"], ddof=2)
