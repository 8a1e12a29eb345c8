"""What `fit()` can be told, checked before anything is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSpec
from opentinker.errors import InvalidArgument, Reason, invalid, unsupported
from opentinker.rollout.agent_loop import Limits
from opentinker.sampling.params import SamplingParams
from opentinker.training.advantages import Advantage, grpo
from opentinker.training.losses import PPO, Loss
from opentinker.training.tuning import AdamW, LoRA, ServerOptions

LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class GRPO:
    """Group-relative policy optimization: G episodes of each task are compared with each other.

    `ddof` and `eps` are those of `advantages.grpo`. Groups whose rewards are all equal teach nothing: with
    `zero_variance` "keep" their tokens count in the loss's denominator, with "drop" they do not.
    """

    group_size: int = 8
    loss: Loss = field(default_factory=PPO)
    eps: float = 1e-6
    ddof: int = 1
    singleton: Literal["zero", "raw"] = "zero"
    zero_variance: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise invalid("group_size", f"must be at least 1, not {self.group_size}")
        if not isinstance(self.loss, Loss):
            raise invalid("loss", f"{self.loss!r} is none of ImportanceSampling(), PPO() and CrossEntropy()")
        grpo([0.0, 1.0], ["a", "a"], eps=self.eps, ddof=self.ddof, singleton=self.singleton)
        if self.zero_variance not in ("keep", "drop"):
            raise invalid("zero_variance", f"must be 'keep' or 'drop', not {self.zero_variance!r}")

    @property
    def advantage(self) -> Advantage:
        """Rewards and groups to advantages."""
        return partial(grpo, eps=self.eps, ddof=self.ddof, singleton=self.singleton)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Play held-out tasks at one pinned version: before training, every `every` steps, and at the end."""

    every: int | None = None
    """Steps between evaluations. None: at the ends only."""
    samples: int = 1
    """Episodes of each task."""
    tasks: int | Sequence[Task] | None = None
    """The tasks, or how many of them. Default: all of the split, or 64 drawn from seeds that training never
    uses.
    """
    split: str = "test"
    sampling: SamplingParams | None = None
    """Default: as in training."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(f"evaluation.{name}", f"must be at least 1, not {value}")
        if isinstance(self.tasks, int) and self.tasks < 1:
            raise invalid("evaluation.tasks", f"must be at least 1, not {self.tasks}")


Schedule = float | Callable[[int], float]
"""A learning rate, or a pure function of the step (1, 2, 3 ...), so that resuming needs no state."""

LATER = {
    "max_staleness": "asynchronous rollouts",
    "resume": "resuming a run",
    "curriculum": "curricula",
    "reference": "a KL term to a reference policy",
    "kl": "a KL term to a reference policy",
    "critic": "a value model",
    "opponents": "multi-agent episodes",
    "off_policy_correction": "off-policy corrections",
    "entropy_coefficient": "an entropy bonus",
    "epochs_per_batch": "several passes over a batch",
    "stragglers": "straggler policies",
}
"""Options of fit() that belong to later versions, by what they are."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "max_staleness": (0,),
    "resume": (None, False),
    "epochs_per_batch": (1,),
    "entropy_coefficient": (0, None),
}


def refuse_later(options: Mapping[str, Any]) -> None:
    """UnsupportedOption for options of later versions, InvalidArgument for names that do not exist."""
    for name, value in options.items():
        if name not in LATER:
            known = ", ".join(sorted(each.name for each in fields(Plan) if each.name != "cluster"))
            raise InvalidArgument(
                f"fit() has no option {name!r}; it has {known}", reason=Reason.INVALID_FIELD, field=name
            )
        if value not in _NEUTRAL.get(name, (None,)):
            raise unsupported(
                name, f"{LATER[name]} is not in this version; leave {name} out (given: {value!r})"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """All of fit()'s options, valid and with defaults filled in."""

    env: EnvironmentSpec
    model: str
    tuning: LoRA
    algorithm: GRPO
    groups_per_step: int
    steps: int
    learning_rate: Schedule
    optimizer: AdamW
    sampling: SamplingParams
    limits: Limits
    evaluation: Evaluation | None
    checkpoint_every: int | None
    seed: int
    env_options: Mapping[str, Any]
    split: str
    shuffle: bool
    name: str
    run_dir: Path | None
    loggers: Sequence[Any]
    callbacks: Sequence[Any]
    trainer: ServerOptions | None
    inference: ServerOptions | None
    stop_after_constant: int
    stop_after_skipped: int
    progress: bool | None

    def __post_init__(self) -> None:
        for name, kind in {
            "tuning": LoRA,
            "algorithm": GRPO,
            "optimizer": AdamW,
            "sampling": SamplingParams,
        }.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise unsupported(name, f"{value!r}: this version has {kind.__name__}(...) only")
        for name in ("groups_per_step", "steps", "stop_after_constant", "stop_after_skipped"):
            if getattr(self, name) < 1:
                raise invalid(name, f"must be at least 1, not {getattr(self, name)}")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise invalid("checkpoint_every", f"must be at least 1 or None, not {self.checkpoint_every}")
        if not self.sampling.full_support and "logprobs" in self.algorithm.loss.needs:
            raise unsupported(
                "sampling",
                "losses with an importance ratio need every token to be possible: leave top_p, top_k, min_p, "
                "penalties, bad_words and logit_bias at their defaults",
            )
        if self.sampling.temperature == 0:
            raise invalid(
                "sampling.temperature", "must be above 0 in training: greedy episodes of a task are equal"
            )

    def optimizer_at(self, step: int) -> AdamW:
        """The optimizer of a step (1, 2, 3 ...)."""
        rate = self.learning_rate
        return replace(self.optimizer, lr=rate(step) if callable(rate) else rate)

    def describe(self) -> dict[str, Any]:
        """As JSON values, for the record of the run."""
        env = self.env if isinstance(self.env, str) else f"{self.env.__module__}:{self.env.__qualname__}"
        rate = self.learning_rate
        return {
            "env": env,
            "env_options": dict(self.env_options),
            "model": self.model,
            "tuning": _plain(self.tuning),
            "algorithm": {"name": type(self.algorithm).__name__, **_plain(self.algorithm)},
            "groups_per_step": self.groups_per_step,
            "steps": self.steps,
            "learning_rate": getattr(rate, "__name__", repr(rate)) if callable(rate) else rate,
            "optimizer": _plain(self.optimizer),
            "sampling": _plain(self.sampling),
            "seed": self.seed,
            "checkpoint_every": self.checkpoint_every,
        }


def _plain(value: Any) -> dict[str, Any]:
    return {each.name: _value(getattr(value, each.name)) for each in fields(value)}


def _value(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {"name": type(value).__name__, **_plain(value)}
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple | list) else value
