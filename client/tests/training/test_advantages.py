"""Advantages of groups against the reference values, and the ways in which others got them wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training.advantages import (
    dr_grpo,
    gpg,
    grpo,
    grpo_loo,
    grpo_passk,
    length_penalty,
    maxrl,
    opo,
    overlong_penalty,
    rloo,
    zero_variance,
)

REWARDS = CASES["A1"]["inp"]["rewards"]
GROUPS = CASES["A1"]["inp"]["group"]
FOUR = REWARDS[:4]
SAME = [0, 0, 0, 0]
TO_GOLDEN = 1e-9

ALL: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "grpo_loo": grpo_loo,
    "maxrl": maxrl,
    "grpo_passk": grpo_passk,
    "gpg": gpg,
}


def close(ours: Any, golden: Any) -> None:
    np.testing.assert_allclose(ours, golden, rtol=0, atol=TO_GOLDEN)


@pytest.mark.parametrize(
    ("case", "estimator"),
    [
        ("A1", grpo),
        ("A2", partial(grpo, eps=1e-4)),
        ("A3", partial(grpo, ddof=0)),
        ("A4", partial(grpo, eps=1e-9)),
        ("A5", dr_grpo),
        ("A6", rloo),
        ("A12", gpg),
    ],
)
def test_reference_values(case: str, estimator: Callable[..., Any]) -> None:
    close(estimator(REWARDS, GROUPS), CASES[case]["out"])


@pytest.mark.parametrize(
    ("case", "estimator"),
    [
        ("A7", grpo_loo),
        ("A7", partial(grpo_loo, flat_others="unscaled")),
        ("A9", maxrl),
        ("A10", grpo_passk),
        ("A11", partial(opo, lengths=[4, 2, 2, 8])),
    ],
)
def test_reference_values_of_one_group(case: str, estimator: Callable[..., Any]) -> None:
    close(estimator(FOUR, SAME), CASES[case]["out"])


def test_a_group_of_one_is_zero_or_raw_never_nan() -> None:
    """B36; A8."""
    golden = CASES["A8"]["out"]
    close(grpo([0.7], ["a"], singleton="raw"), [golden["verl/SkyRL grpo"]])
    close(rloo([0.7], ["a"], singleton="raw"), [golden["verl rloo loop"]])
    assert golden["torchforge (torch.std n=1)"] == "nan"  # what another gives
    for estimator in (*ALL.values(), partial(opo, lengths=[5])):
        assert estimator([0.7], ["a"]).tolist() == [golden["prime-rl/tinker/NeMo"]]
        raw = estimator([0.7], ["a"], singleton="raw")
        np.testing.assert_allclose(raw, [0.7], rtol=1e-5)
        with pytest.raises(errors.InvalidArgument, match="singleton"):
            estimator([0.7], ["a"], singleton="nan")


def test_groups_are_formed_by_id_not_by_position() -> None:
    """B34: a ragged batch; B37: the same number in two environments is two groups."""
    constant = grpo([0.0, 1.0, 2.0, 3.0] * 2, ["a", "b", "c", "d"] * 2)
    np.testing.assert_array_equal(constant, np.zeros(8))
    ragged = grpo([0, 1, 2, 2, 3, 3, 3, 0, 1, 1], ["a", "b", "c", "c", "d", "d", "d", "a", "b", "b"])
    np.testing.assert_array_equal(ragged, np.zeros(10))
    two = grpo([0.0, 1.0, 5.0, 6.0], [("math", 0), ("math", 0), ("games", 0), ("games", 0)])
    np.testing.assert_allclose(two, [-0.7071058, 0.7071058, -0.7071058, 0.7071058], atol=1e-6)


@pytest.mark.parametrize("name", [*ALL, "opo"])
def test_the_order_of_rows_and_the_other_groups_do_not_matter(name: str) -> None:
    generator = np.random.default_rng(7)
    for _ in range(20):
        sizes = generator.integers(1, 9, size=5)
        groups = np.repeat(np.arange(5), sizes)
        rewards = generator.choice([0.0, 0.25, 1.0, 3.0], size=len(groups))
        lengths = generator.integers(1, 50, size=len(groups))

        def run(rows: Any, r: Any = rewards, g: Any = groups, n: Any = lengths) -> Any:
            extra = {"lengths": n[rows]} if name == "opo" else {}
            return (opo if name == "opo" else ALL[name])(r[rows], g[rows], **extra)

        everything = run(np.arange(len(groups)))
        order = generator.permutation(len(groups))
        np.testing.assert_allclose(run(order), everything[order], atol=1e-12)
        if name != "gpg":  # which counts over the batch, and says so
            for group in range(5):
                rows = np.flatnonzero(groups == group)
                np.testing.assert_allclose(run(rows), everything[rows], atol=1e-12)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1000.1, 7.3, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_constant_groups_have_no_advantage(reward: float, dtype: type) -> None:
    """B33: rounding noise is no credit."""
    rewards = np.full(8, reward, dtype=dtype)
    noisy = rewards.copy()
    noisy[3] = np.nextafter(np.float32(reward), np.float32(np.inf))
    for estimator in (*ALL.values(), partial(opo, lengths=[1, 2, 3, 4, 5, 6, 7, 8])):
        assert not estimator(rewards.tolist(), ["a"] * 8).any()
        assert not estimator(noisy.tolist(), ["a"] * 8).any()
    assert zero_variance(noisy.tolist(), ["a"] * 8).all()


def test_small_differences_keep_their_scale() -> None:
    """B26: large rewards that differ by little."""
    exact = grpo([1000.0, 1000.001] * 4, ["a"] * 8)
    single = grpo(np.array([1000.0, 1000.001] * 4, dtype=np.float32).tolist(), ["a"] * 8)
    np.testing.assert_allclose(single, exact, rtol=2e-3)
    np.testing.assert_allclose(exact, np.array([-1, 1] * 4) * np.sqrt(7 / 8), rtol=3e-3)


def test_an_outlier_among_equal_rewards_stays_bounded() -> None:
    """B32: the others' std is 0 or a residue; others got 7428 here."""
    rewards = np.array([0.3] * 7 + [1.0], dtype=np.float32).tolist()
    for estimator in ALL.values():
        values = estimator(rewards, ["a"] * 8)
        assert np.isfinite(values).all()
        assert np.abs(values).max() < 10
    assert np.abs(grpo_loo(rewards, ["a"] * 8, flat_others="unscaled")).max() < 10
    # Not only exactly equal ones, and on any scale.
    generator = np.random.default_rng(3)
    for scale in (1e-3, 1.0, 1e6):
        for size in (2, 3, 8, 16):
            noise = generator.normal(size=size) * 10.0 ** generator.uniform(-9, 0)
            spread = scale * (np.eye(size)[0] + noise)
            assert np.abs(grpo_loo(spread, ["a"] * size)).max() <= 2 * np.sqrt(size)


def test_the_outlier_of_a_one_hot_group() -> None:
    """A7b: undivided by the documented switch; by default divided by half of the group's std."""
    one_hot = [1.0, 0.0, 0.0, 0.0]
    close(grpo_loo(one_hot, SAME, flat_others="unscaled"), CASES["A7b"]["out"])
    ours = grpo_loo(one_hot, SAME, eps=0.0)
    np.testing.assert_allclose(ours, [4.0, *[-1 / np.sqrt(3)] * 3])
    with pytest.raises(errors.InvalidArgument, match="flat_others"):
        grpo_loo(one_hot, SAME, flat_others="nan")  # type: ignore[arg-type]


def test_a_missing_reward_is_not_zero() -> None:
    """B38: 0.0 is a reward, None is none; B43: a crashed member is in nobody's mean."""
    for name, estimator in ALL.items():
        rewards = [1.0, 0.0, 0.5]
        with_missing = estimator([None, *rewards], ["a"] * 4)
        assert with_missing[0] == 0.0, name
        np.testing.assert_allclose(with_missing[1:], estimator(rewards, ["a"] * 3), err_msg=name)
        assert estimator([0.0, 1.0], ["a", "a"])[0] < 0 or name == "grpo_passk"
    three = dr_grpo([0.0, None, 1.0, 1.0], ["a"] * 4)
    np.testing.assert_allclose(three, [-2 / 3, 0, 1 / 3, 1 / 3])
    assert grpo([None, None], ["a", "b"]).tolist() == [0.0, 0.0]
    assert gpg([1.0, 0.0, None, None], [0, 0, 1, 1])[0] == 0.5 * 2 / 1  # of two rewards, one is not 0


def test_variance_is_judged_on_the_raw_reward() -> None:
    """B41: a length penalty makes the solved groups vary."""
    raw, groups = [1.0, 1.0, 0.0, 1.0], ["solved", "solved", "open", "open"]
    shaped = length_penalty(raw, groups, [100, 50, 80, 20])
    assert zero_variance(raw, groups).tolist() == [True, True, False, False]
    assert not zero_variance(shaped, groups).any()
    assert not zero_variance([1.0], ["alone"]).any()


def test_opo_weighs_by_length() -> None:
    baseline = FOUR[0] - opo(FOUR, SAME, [4, 2, 2, 8])[0]
    close(baseline, CASES["A11"]["baseline"])
    np.testing.assert_allclose(opo(FOUR, SAME, [3, 3, 3, 3]), dr_grpo(FOUR, SAME))
    np.testing.assert_allclose(opo(FOUR, SAME, [0, 0, 0, 0]), dr_grpo(FOUR, SAME))
    for lengths in ([1, 2, 3], [1, 2, 3, -1]):
        with pytest.raises(errors.InvalidArgument, match="lengths"):
            opo(FOUR, SAME, lengths)


def test_passk_gives_all_to_the_best() -> None:
    assert grpo_passk([1.0, 0.0, 1.0], ["a"] * 3).tolist() == [0.0, 0.0, 0.0]
    assert np.count_nonzero(grpo_passk(FOUR * 2, SAME + [1] * 4)) == 2


def test_maxrl_takes_no_negative_rewards() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"rewards\[1\]"):
        maxrl([1.0, -1.0], ["a", "a"])


def test_penalties() -> None:
    """A18, A16."""
    penalty = overlong_penalty([70, 80, 90, 100], max_tokens=100, buffer_tokens=20)
    close(penalty, CASES["A18"]["out"])
    assert overlong_penalty([300], max_tokens=100, buffer_tokens=20, factor=0.5).tolist() == [-0.5]
    shaped = length_penalty([1.0, 1.0, 0.0, 1.0], SAME, [100, 50, 80, 20], weight=0.5)
    close(dr_grpo(shaped, SAME), CASES["A16"]["out"])
    assert length_penalty([0.0, None, 0.0], [0, 0, 0], [5, 6, 7]) == [0.0, None, 0.0]
    for buffer in (0, 101):
        with pytest.raises(errors.InvalidArgument, match="buffer_tokens"):
            overlong_penalty([1], max_tokens=100, buffer_tokens=buffer)


def test_what_is_not_finite_is_refused_by_index() -> None:
    for estimator in ALL.values():
        with pytest.raises(errors.InvalidArgument, match=r"rewards\[1\]"):
            estimator([1.0, float("nan")], ["a", "a"])
        with pytest.raises(ValueError, match="2 rewards"):
            estimator([1.0, 0.0], ["a"])
    with pytest.raises(errors.InvalidArgument, match="ddof"):
        grpo([1.0, 0.0], ["a", "a"], ddof=2)
    with pytest.raises(errors.InvalidArgument, match="eps"):
        grpo([1.0, 0.0], ["a", "a"], eps=-1.0)
