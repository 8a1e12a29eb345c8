"""One way to call every estimator, the user's own too: by the names of its parameters.

An estimator is a function whose parameters are named like fields of `AdvantageInputs`. It returns n
numbers (one a trajectory) or a list of arrays: [T_i] (one a token), or [turns_i] (one a turn) if it takes
`turn_rewards`; or `GAE`. Options go by `functools.partial`.

    def halved(rewards, groups): ...                                 # a user's own
    estimate(partial(grpo, eps=1e-4), inputs)
    estimate(partial(reinforce_plus_plus, gamma=0.99), inputs)
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import numpy as np

from opentinker.errors import invalid
from opentinker.training.advantages.group_relative import gpg
from opentinker.training.advantages.per_token import (
    GAE,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    whiten,
)
from opentinker.training.rows import Floats, Mask, Row

Advantage = Callable[..., Any]
"""An estimator: see the module."""

_WHITENING = (reinforce_plus_plus, reinforce_plus_plus_baseline)


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What is known of n trajectories. None: not known, and an estimator that names it is refused."""

    rewards: Sequence[float | None]
    """[n]; None where none was given, which is not 0."""
    groups: Sequence[Hashable]
    """[n] group ids."""
    masks: Sequence[Mask] | None = None
    """A list of [T_i], 1 where the policy sampled the token."""
    lengths: Sequence[int] | None = None
    """[n] sampled tokens."""
    token_rewards: Sequence[Row] | None = None
    """A list of [T_i]."""
    turn_rewards: Sequence[Sequence[float | None]] | None = None
    """A list of [turns_i]."""
    values: Sequence[Row] | None = None
    """A list of [T_i], the value head's."""


_INPUTS = {each.name for each in fields(AdvantageInputs)}


@dataclass(frozen=True, slots=True)
class Estimates:
    """n arrays of `advantages`: [1] per trajectory, [turns_i] per turn or [T_i] per token; `returns` [T_i]
    where the estimator gives what a value head learns.
    """

    per: Literal["trajectory", "turn", "token"]
    advantages: list[Floats]
    returns: list[Floats] | None = None


def estimate(estimator: Advantage, inputs: AdvantageInputs) -> Estimates:
    """Call an estimator with the inputs that it names and check what it returns.

    InvalidArgument if it names something unknown or not given, or returns anything but finite numbers of the
    right count.
    """
    given = _given(estimator, inputs)
    result = estimator(**given)
    made, returns = (result.advantages, result.returns) if isinstance(result, GAE) else (result, None)
    if isinstance(made, list) and not all(np.ndim(each) == 0 for each in made):
        per: Literal["turn", "token"] = "turn" if "turn_rewards" in given else "token"
        shapes = inputs.turn_rewards if per == "turn" else inputs.masks
        if shapes is None:
            raise invalid("advantage", f"{_name(estimator)} gives a number a token, and no masks are known")
        rows = [np.asarray(row, dtype=np.float64) for row in made]
        wanted = [(len(row),) for row in shapes]
        if [row.shape for row in rows] != wanted:
            raise invalid("advantage", f"{_name(estimator)} must give one number a {per}")
        _check_finite(estimator, rows)
        return Estimates(per, rows, returns)
    flat = np.asarray(made, dtype=np.float64)
    if flat.shape != (len(inputs.rewards),):
        raise invalid(
            "advantage",
            f"{_name(estimator)} must give {len(inputs.rewards)} numbers, one a trajectory, not {flat.shape}",
        )
    _check_finite(estimator, [flat])
    return Estimates("trajectory", list(flat.reshape(-1, 1)))


def needs_whole_batch(estimator: Advantage) -> bool:
    """Whether it gives other values for a part of the batch than for the whole: then groups cannot be trained
    on as they stream in. A user's function says so with an attribute `needs_whole_batch = True`.
    """
    options: dict[str, Any] = {}
    while isinstance(estimator, partial):
        options = {**estimator.keywords, **options}
        estimator = estimator.func
    if estimator in _WHITENING:
        return bool(options.get("whitened", True))
    return estimator in (gpg, whiten) or bool(getattr(estimator, "needs_whole_batch", False))


def _given(estimator: Advantage, inputs: AdvantageInputs) -> dict[str, Any]:
    """The inputs that an estimator asks for; those with a default only where they are known."""
    given = {}
    for parameter in inspect.signature(estimator).parameters.values():
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        optional = parameter.default is not parameter.empty
        value = getattr(inputs, name) if name in _INPUTS else None
        if value is not None:
            given[name] = value
        elif not optional:
            problem = (
                "which is not known here" if name in _INPUTS else f"there are {', '.join(sorted(_INPUTS))}"
            )
            raise invalid("advantage", f"{_name(estimator)} needs {name}, {problem}")
    return given


def _name(estimator: Advantage) -> str:
    while isinstance(estimator, partial):
        estimator = estimator.func
    return getattr(estimator, "__name__", repr(estimator))


def _check_finite(estimator: Advantage, rows: Sequence[Floats]) -> None:
    for index, row in enumerate(rows):
        if not np.isfinite(row).all():
            raise invalid("advantage", f"{_name(estimator)} gave what is not finite (row {index})")
