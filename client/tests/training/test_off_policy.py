"""Off-policy corrections, their statistics, and what a restricted support does to a logprob."""

from typing import Any

import numpy as np
import pytest
from client.tests.training.golden import CASES

import opentinker as ot
from opentinker import errors
from opentinker.sampling.support import Support
from opentinker.training import off_policy, support
from opentinker.training.samples import check

INPUTS = {name: [np.array(row) for row in rows] for name, rows in CASES["L0_inputs"].items()}
MASKS = CASES["L0_inputs"]["mask"]
PAIRS = list(zip(INPUTS["old"], INPUTS["rollout"], MASKS, strict=True))
RATIOS = off_policy.token_ratio(INPUTS["old"], INPUTS["rollout"])


def close(ours: Any, golden: Any) -> None:
    np.testing.assert_allclose(ours, golden, rtol=0, atol=1e-9)


def test_token_corrections() -> None:
    """O1, O2, O3, O7."""
    close(RATIOS, CASES["O1"]["out"])
    close(off_policy.truncate(RATIOS, 1.5), CASES["O2"]["out"])
    close(off_policy.mask_outside(RATIOS, 0.5, 1.5), CASES["O3"]["out"])
    close(off_policy.batch_norm_factor(off_policy.truncate(RATIOS, 1.5), MASKS), CASES["O7"]["mean"])
    assert off_policy.batch_norm_factor([[0.0]], [[1]]) == off_policy.batch_norm_factor([[3.0]], [[0]]) == 1.0


def test_sequence_corrections() -> None:
    """O4, O5."""
    products = [off_policy.sequence_ratio(*pair) for pair in PAIRS]
    close(products, CASES["O4"]["product"])
    close([off_policy.geometric_ratio(*pair) for pair in PAIRS], CASES["O4"]["geo"])
    close(off_policy.mask_outside(products, 0.0, 1.4), CASES["O5"]["out"])
    close(off_policy.truncate(products, 1.4), [1.4, CASES["O4"]["product"][1]])
    assert off_policy.geometric_ratio([-1.0], [-9.0], [0]) == 1.0


def test_one_far_token_does_not_hide_in_a_sequence_that_is_kept() -> None:
    """B58: ratio 50 among many of 1."""
    behavior = np.full(1000, -1.0)
    proximal = behavior.copy()
    proximal[7] += np.log(50.0)
    mask = np.ones(1000, dtype=int)
    loose = off_policy.geometric_mask(proximal, behavior, mask, low=0.99, high=1.01)
    assert loose.max() == pytest.approx(50.0)  # what others let through
    ours = off_policy.geometric_mask(proximal, behavior, mask, low=0.99, high=1.01, token_high=2.0)
    assert ours.max() == 2.0
    assert ours.sum() == pytest.approx(999 + 2.0)
    assert not off_policy.geometric_mask(proximal + 0.1, behavior, mask, low=0.99, high=1.01).any()


def test_mismatch() -> None:
    """O8."""
    found = off_policy.mismatch(INPUTS["old"], INPUTS["rollout"], MASKS)
    close([found.k1, found.k3, found.chi2], [CASES["O8"][name] for name in ("k1", "k3", "chi2")])
    weights = np.concatenate([row[np.array(mask) == 1] for row, mask in zip(RATIOS, MASKS, strict=True)])
    close(found.ess, 1 / np.mean((weights / weights.mean()) ** 2))
    close(found.mean_abs, (0.1 + 0.5 + 0.7) / 5)
    assert found.tokens == 5
    same = off_policy.mismatch([[-1.0, -np.inf]], [[-1.0, 0.0]], [[1, 0]])
    assert (same.k1, same.k3, same.chi2, same.ess) == (0.0, 0.0, 0.0, 1.0)
    assert off_policy.mismatch([[-1.0]], [[-2.0]], [[0]]).tokens == 0


def test_opsm_looks_at_the_policy_that_is_trained() -> None:
    """O9; B55: with the proximal logprobs the divergence would be another."""
    keep, divergence = off_policy.opsm([1.0, -0.5], INPUTS["lp"], INPUTS["rollout"], MASKS, delta=0.1)
    close(keep, CASES["O9"]["keep"])
    close(divergence, CASES["O9"]["seq_kl"])
    _, stale = off_policy.opsm([1.0, -0.5], INPUTS["old"], INPUTS["rollout"], MASKS, delta=0.1)
    assert abs(stale[0] - divergence[0]) > 0.05
    assert off_policy.opsm([-1.0], [[-1.0]], [[-1.0]], [[1]], delta=0.0)[0].tolist() == [1.0]
    assert off_policy.opsm([-1.0], [[-9.0]], [[-1.0]], [[1]], delta=1.0)[0].tolist() == [0.0]
    assert off_policy.opsm([0.0], [[-9.0]], [[-1.0]], [[1]], delta=1.0)[0].tolist() == [1.0]


def test_ratios_stay_finite() -> None:
    assert off_policy.token_ratio(0.0, -1e4) == np.exp(20.0)
    assert off_policy.sequence_ratio([0.0] * 9, [-1e3] * 9, [1] * 9) == np.exp(20.0)
    for call, name in (
        (lambda: off_policy.truncate([1.0], 0.0), "high"),
        (lambda: off_policy.mask_outside([1.0], 2.0, 1.0), "low"),
        (lambda: off_policy.mismatch([[np.nan]], [[0.0]], [[1]]), "logprobs"),
        (lambda: off_policy.opsm([1.0], [], [], [], delta=0.1), "advantages"),
    ):
        with pytest.raises(errors.InvalidArgument, match=name):
            call()


LOGITS = [2.0, 1.0, 0.0, -1.0]


def test_temperature_and_support() -> None:
    """T1; B51: the temperature on both sides; B52: the support on both sides."""
    golden = CASES["T1"]
    close(support.logprob(LOGITS, 1), golden["raw"])
    found = support.sampled(LOGITS, 1, temperature=0.7, top_p=0.9)
    close(found.scaled, golden["scaled"])
    close(found.kept_mass, golden["kept_mass"])
    close(found.processed, golden["processed"])
    close(np.exp(found.scaled - found.processed), golden["spurious_IS_ratio"])
    # The same policy, the same support on both sides: the ratio is 1.
    other = support.sampled(np.array(LOGITS) + 3.0, 1, temperature=0.7, top_p=0.9)
    close(np.exp(other.processed - found.processed), 1.0)
    full = support.sampled(LOGITS, 1, temperature=0.7)
    assert full.kept_mass == pytest.approx(1.0)
    assert full.processed == pytest.approx(full.scaled)


def test_which_tokens_are_kept() -> None:
    assert support.kept(LOGITS, temperature=0.7, top_p=0.9).tolist() == [True, True, False, False]
    assert support.kept(LOGITS, top_k=3).tolist() == [True, True, True, False]
    assert support.kept(LOGITS, top_p=1e-9).tolist() == [True, False, False, False]
    assert support.kept(LOGITS, top_p=1.0).all()
    assert support.kept([0.0] * 4, top_p=0.5).tolist() == [True, True, False, False]
    # What top_k left is renormalized before top_p.
    assert support.kept([1.0, 1.0, 1.0, 1.0], top_k=2, top_p=0.6).tolist() == [True, True, False, False]
    with pytest.raises(errors.InvalidArgument, match="token"):
        support.sampled(LOGITS, 3, top_k=2)
    for options in ({"top_p": 0.0}, {"top_k": 0}, {"temperature": 0.0}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(options))):
            support.sampled(LOGITS, 0, **options)  # type: ignore[arg-type]


def test_supports_are_joined_at_their_places() -> None:
    """Two turns, an observation between them and a prompt before: there the whole vocabulary."""
    first = Support(np.array([2, 1], np.int32), np.array([5, 6, 7], np.int32))
    second = Support(np.array([-1, 0, 1], np.int32), np.array([9], np.int32))
    joined = Support.joined([(3, first), (6, second)], 10)
    assert joined is not None
    assert joined.sizes.tolist() == [0, 0, 0, 2, 1, 0, -1, 0, 1, 0]
    assert joined.sets()[3:9] == [(5, 6), (7,), None, None, None, (9,)]
    assert joined.unlisted == 1
    assert Support.joined([], 10) is None
    assert Support.of_wire(b"", b"") is None


def test_a_malformed_support_is_refused_by_index() -> None:
    def row(sizes: list[int], ids: list[int]) -> ot.TrainSample:
        support = Support(np.array(sizes, np.int32), np.array(ids, np.int32))
        return ot.TrainSample([1, 2, 3], [0, 1, 1], support=support)

    check([row([-1, 1, 2], [2, 3, 4])])
    for bad in (row([0, 1], [2]), row([0, 1, 1], [2]), row([0, -1, 1], [3]), row([0, 257, 0], [2] * 257)):
        with pytest.raises(errors.InvalidSample, match="sample 1: support") as caught:
            check([row([0, 0, 0], []), bad])
        assert caught.value.field == "samples[1]"
