"""From trajectories to train samples: which of them count, what rows they make, who gets credit for what.

`gather` makes the rows; `credit` gives their tokens advantages. Between the two a loop may score the rows
(`Policy.forward`) for what credit depends on: values, KL to a reference.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import invalid
from opentinker.rollout.trajectory import Batch, Trajectory
from opentinker.training.advantages import (
    Advantage,
    AdvantageInputs,
    Estimates,
    estimate,
    grpo,
)
from opentinker.training.advantages import (
    zero_variance as is_zero_variance,
)
from opentinker.training.samples import TrainSample, TrainSamples
from opentinker.training.spread import spread

Floats = NDArray[np.float64]

ZeroVariance = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class Episodes:
    """The trajectories of a batch that count and their rows, which have no advantages yet. Row j belongs to
    trajectory `owners[j]`; its rows are in order.
    """

    trajectories: Sequence[Trajectory]
    rows: Sequence[TrainSample]
    owners: Sequence[int]
    metrics: dict[str, float] = field(default_factory=dict)

    def joined(self, per_row: Sequence[NDArray[np.floating]]) -> list[Floats]:
        """Arrays [n] of each row as one array [T_i] for each trajectory."""
        parts: list[list[NDArray[np.floating]]] = [[] for _ in self.trajectories]
        for owner, array in zip(self.owners, per_row, strict=True):
            parts[owner].append(array)
        return [np.concatenate([np.zeros(0), *each]) for each in parts]

    def split(self, per_trajectory: Sequence[Floats]) -> list[Floats]:
        """Arrays [T_i] of each trajectory as one array [n] for each row."""
        begin = [0] * len(self.trajectories)
        result = []
        for owner, row in zip(self.owners, self.rows, strict=True):
            end = begin[owner] + len(row.token_ids)
            result.append(per_trajectory[owner][begin[owner] : end])
            begin[owner] = end
        return result

    def masks(self) -> list[NDArray[np.int64]]:
        """The loss mask [T_i] of each trajectory."""
        return [
            mask.astype(np.int64) for mask in self.joined([np.asarray(row.loss_mask) for row in self.rows])
        ]


def train_samples(
    batch: Batch, advantage: Advantage = grpo, *, zero_variance: ZeroVariance = "keep"
) -> TrainSamples:
    """Turn the trajectories of a batch into rows; each segment of a trajectory is a row.

    `advantage` is a function of `opentinker.advantages`, or one of your own: its parameters are named like
    the fields of `advantages.AdvantageInputs`. What infrastructure ended, what has no reward, and what has a
    token that was chosen among more ids than are listed, leaves its group and is counted. Groups whose
    rewards are all equal teach nothing: "keep" sends their rows with advantage 0, so that they count in the
    denominator; "drop" leaves them out of both.
    """
    return credit(gather(batch, zero_variance), advantage)


def gather(batch: Batch, zero_variance: ZeroVariance = "keep") -> Episodes:
    """The trajectories that count and their rows. `zero_variance` is judged on the rewards as they came from
    the environment: shaping by length or KL makes any group vary.
    """
    if zero_variance not in ("keep", "drop"):
        raise invalid("zero_variance", f"must be 'keep' or 'drop', not {zero_variance!r}")
    reasons: Counter[str] = Counter()
    usable = [trajectory for trajectory in batch if _usable(trajectory, reasons)]
    groups = [trajectory.group for trajectory in usable]
    constant = is_zero_variance([trajectory.reward.value for trajectory in usable], groups)
    sizes = Counter(groups)
    flat = {group for group, is_flat in zip(groups, constant, strict=True) if is_flat}
    kept = [trajectory for trajectory in usable if not (zero_variance == "drop" and trajectory.group in flat)]
    rows = [(index, row) for index, trajectory in enumerate(kept) for row in _rows(trajectory)]
    total = sum(len(group.trajectories) for group in batch.groups)
    excluded = sum(reasons.values())
    metrics = {
        "group/count": float(len(sizes)),
        "group/zero_variance_fraction": len(flat) / len(sizes) if sizes else 0.0,
        "group/singletons": float(sum(size == 1 for size in sizes.values())),
        "rollout/excluded": float(excluded),
        "rollout/excluded_fraction": excluded / total if total else 0.0,
    }
    metrics |= {f"rollout/excluded/{reason}": float(count) for reason, count in reasons.items()}
    return Episodes(kept, [row for _, row in rows], [index for index, _ in rows], metrics)


def credit(
    episodes: Episodes,
    advantage: Advantage,
    *,
    bonus: Sequence[float] | Floats | None = None,
    token_bonus: Sequence[NDArray[np.floating]] | None = None,
    values: Sequence[NDArray[np.floating]] | None = None,
    adjustment: Sequence[NDArray[np.floating]] | None = None,
) -> TrainSamples:
    """Give the rows their advantages, and returns and old values where values are known.

    `bonus` (one a trajectory) and `token_bonus` ([n] a row) are added to the rewards, negative for penalties:
    the one at the end, the other where it stands. `values` ([n] a row) are the value head's; `adjustment`
    ([n] a row) is added to the advantages.
    """
    masks = episodes.masks()
    shaped = _Rewards.of(episodes, masks, bonus, token_bonus)
    joined = None if values is None else episodes.joined(values)
    made = estimate(
        advantage,
        AdvantageInputs(
            rewards=shaped.total,
            groups=[trajectory.group for trajectory in episodes.trajectories],
            masks=masks,
            lengths=[trajectory.sampled_tokens for trajectory in episodes.trajectories],
            token_rewards=shaped.tokens,
            turn_rewards=shaped.turns,
            values=joined,
        ),
    )
    advantages = episodes.split(_per_token(made, episodes, masks))
    if adjustment is not None:
        advantages = [row + change for row, change in zip(advantages, adjustment, strict=True)]
    rows = [
        replace(row, advantages=(np.asarray(row.loss_mask) * array).astype(np.float32))
        for row, array in zip(episodes.rows, advantages, strict=True)
    ]
    if made.returns is not None and values is not None:
        rows = [
            replace(row, returns=back.astype(np.float32), old_values=np.asarray(old, dtype=np.float32))
            for row, back, old in zip(rows, episodes.split(made.returns), values, strict=True)
        ]
    metrics = episodes.metrics | spread("critic/advantages", _at_loss_tokens(rows, advantages))
    if bonus is not None or token_bonus is not None:
        metrics |= spread("critic/rewards", np.asarray(shaped.total))
    return TrainSamples(rows, metrics)


@dataclass(frozen=True, slots=True)
class _Rewards:
    """The rewards of n trajectories at three grains. Each grain sums to the same."""

    total: list[float]
    turns: list[list[float | None]]
    tokens: list[Floats]

    @classmethod
    def of(
        cls,
        episodes: Episodes,
        masks: Sequence[NDArray[np.int64]],
        bonus: Sequence[float] | Floats | None,
        token_bonus: Sequence[NDArray[np.floating]] | None,
    ) -> "_Rewards":
        """What the environment gave for turns, the rest of the episode's reward at its end, and bonuses."""
        extra = episodes.joined(token_bonus) if token_bonus is not None else [np.zeros(len(m)) for m in masks]
        made = cls([], [], [])
        for index, (trajectory, mask) in enumerate(zip(episodes.trajectories, masks, strict=True)):
            turns: list[float | None] = [turn.reward for turn in trajectory.turns]
            value = trajectory.reward.value
            assert value is not None, "trajectories without a reward were left out"
            rest = value - sum(reward for reward in turns if reward is not None)
            rest += float(bonus[index]) if bonus is not None else 0.0
            if turns and rest:
                turns[-1] = (turns[-1] or 0.0) + rest
            places = np.flatnonzero(mask)
            tokens = np.where(mask, extra[index], 0.0)
            ends = np.cumsum([turn.completion_tokens for turn in trajectory.turns])
            for number, (reward, end) in enumerate(zip(turns, ends.tolist(), strict=True)):
                begin = end - trajectory.turns[number].completion_tokens
                penalty = float(tokens[places[begin:end]].sum())
                if reward is not None and len(places):
                    tokens[places[max(end - 1, 0)]] += reward
                if token_bonus is not None:
                    turns[number] = (reward or 0.0) + penalty
            made.turns.append(turns)
            made.tokens.append(tokens)
            made.total.append(value + (float(bonus[index]) if bonus is not None else 0.0))
            made.total[-1] += float(np.where(mask, extra[index], 0.0).sum())
        return made


def _per_token(made: Estimates, episodes: Episodes, masks: Sequence[NDArray[np.int64]]) -> list[Floats]:
    """Advantages [T_i] of each trajectory, whatever the estimator's grain."""
    if made.per == "token":
        return made.advantages
    if made.per == "trajectory":
        return [np.full(len(mask), row[0]) for mask, row in zip(masks, made.advantages, strict=True)]
    result = []
    for trajectory, mask, row in zip(episodes.trajectories, masks, made.advantages, strict=True):
        tokens = np.zeros(len(mask))
        tokens[mask == 1] = np.repeat(row, [turn.completion_tokens for turn in trajectory.turns])
        result.append(tokens)
    return result


def _usable(trajectory: Trajectory, reasons: Counter[str]) -> bool:
    if not trajectory.end_reason.trainable:
        reasons[trajectory.end_reason.value] += 1
        return False
    if not trajectory.reward.is_valid:
        reasons[trajectory.reward.status.value] += 1
        return False
    if any(segment.support is not None and segment.support.unlisted for segment in trajectory.segments):
        reasons["SUPPORT_TOO_LARGE"] += 1
        return False
    return True


def _rows(trajectory: Trajectory) -> Iterator[TrainSample]:
    for number, segment in enumerate(trajectory.segments):
        if not any(segment.loss_mask):
            continue
        yield TrainSample(
            token_ids=segment.token_ids,
            loss_mask=segment.loss_mask,
            logprobs=segment.logprobs,
            temperature=trajectory.temperature,
            spans=segment.spans,
            group_id=trajectory.group,
            sample_id=f"{trajectory.group}/{trajectory.member}/{number}",
            images=segment.images,
            support=segment.support,
        )


def _at_loss_tokens(rows: Sequence[TrainSample], arrays: Sequence[Floats]) -> Floats:
    chosen = [array[np.asarray(row.loss_mask, dtype=bool)] for row, array in zip(rows, arrays, strict=True)]
    return np.concatenate(chosen) if chosen else np.zeros(0)
