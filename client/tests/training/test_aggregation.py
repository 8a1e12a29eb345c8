"""One denominator for the whole batch: reference values, and that no split can change anything."""

import numpy as np
import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training.aggregation import Mode, aggregate

LOSSES = CASES["L1"]["out"]
MASKS = CASES["L0_inputs"]["mask"]
MODES: list[tuple[Mode, float | None, str]] = [
    ("token_mean", None, "token-mean"),
    ("token_sum", None, "token-sum"),
    ("seq_mean_token_sum", None, "seq-mean-token-sum"),
    ("seq_mean_token_sum_norm", 3, "seq-mean-token-sum-norm(L=3)"),
    ("seq_mean_token_mean", None, "seq-mean-token-mean"),
]


@pytest.mark.parametrize(("mode", "norm", "key"), MODES)
def test_reference_values(mode: Mode, norm: float | None, key: str) -> None:
    """L1_agg; L1b is Dr. GRPO as TRL has it."""
    total = aggregate(mode, MASKS, norm).total(LOSSES, MASKS)
    np.testing.assert_allclose(total, CASES["L1_agg"][key], rtol=0, atol=1e-9)
    if norm is not None:
        np.testing.assert_allclose(total, CASES["L1b"]["out"], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("mode", "norm"), [(mode, norm) for mode, norm, _ in MODES])
def test_no_split_changes_the_loss(mode: Mode, norm: float | None) -> None:
    """B01, B02, B03, B05, B06: parts are summed under the whole's denominator, padding counts nowhere."""
    generator = np.random.default_rng(1)
    masks = [generator.integers(0, 2, size=size) for size in (1, 2, 3, 10, 4, 7, 5, 1)]
    losses = [generator.normal(size=len(mask)) for mask in masks]
    plan = aggregate(mode, masks, norm)
    whole = plan.total(losses, masks)
    for size in (1, 2, 4, 8):
        parts = 0.0
        for begin in range(0, 8, size):
            rows = slice(begin, begin + size)
            share = None if plan.weights is None else plan.weights[rows]
            part = type(plan)(plan.denominator, share)
            parts += part.total(losses[rows], masks[rows])
        np.testing.assert_allclose(parts, whole, atol=1e-12)
    padded = [np.append(row, [np.nan, np.inf, 9.0]) for row in losses]
    padding = [np.append(mask, [0, 0, 0]) for mask in masks]
    np.testing.assert_allclose(aggregate(mode, padding, norm).total(padded, padding), whole, atol=1e-12)


def test_means_of_means_are_not_what_we_give() -> None:
    """N1, N2: micro-batches [1, 1, 1] and [5], or two ranks with them."""
    losses, masks = [[1.0, 1.0, 1.0], [5.0]], [[1, 1, 1], [1]]
    ours = aggregate("token_mean", masks).total(losses, masks)
    assert ours == CASES["N1"]["correct_token_mean"] == CASES["N2"]["global_denom"]
    each = [aggregate("token_mean", [m]).total([x], [m]) for x, m in zip(losses, masks, strict=True)]
    assert np.mean(each) == CASES["N1"]["mean_of_microbatch_means"] == CASES["N2"]["local_denom"]
    assert ours != np.mean(each)


@pytest.mark.parametrize(("mode", "norm"), [(mode, norm) for mode, norm, _ in MODES])
def test_nothing_to_train_on_is_a_loss_of_zero(mode: Mode, norm: float | None) -> None:
    """B16: not 0 / 0; and a sequence without tokens is none."""
    nothing = aggregate(mode, [[0, 0], [0]], norm)
    assert nothing.total([[np.nan, 1.0], [np.inf]], [[0, 0], [0]]) == 0.0
    one = aggregate(mode, [[1, 1], [0]], norm).total([[1.0, 3.0], [9.0]], [[1, 1], [0]])
    assert one == {"token_mean": 2.0, "seq_mean_token_mean": 2.0, "seq_mean_token_sum_norm": 4 / 3}.get(
        mode, 4.0
    )


def test_options_are_checked() -> None:
    with pytest.raises(errors.InvalidArgument, match="norm"):
        aggregate("seq_mean_token_sum_norm", MASKS)
    with pytest.raises(errors.InvalidArgument, match="norm"):
        aggregate("token_mean", MASKS, norm=3)
    with pytest.raises(errors.InvalidArgument, match="norm"):
        aggregate("seq_mean_token_sum_norm", MASKS, norm=0)
    with pytest.raises(errors.InvalidArgument, match="aggregation"):
        aggregate("token-mean", MASKS)  # type: ignore[arg-type]
