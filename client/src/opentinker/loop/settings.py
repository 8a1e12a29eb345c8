"""What `fit()` can be told, checked before anything is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSpec
from opentinker.errors import InvalidArgument, Reason, invalid, unsupported
from opentinker.loop.algorithms import GRPO, ActorCritic, Algorithm, Schedule
from opentinker.rollout.cast import MAIN, check_cast, check_player
from opentinker.rollout.cast import describe as describe_player
from opentinker.rollout.formats import check_name
from opentinker.rollout.limits import Limits
from opentinker.rollout.stragglers import MinViable, Stragglers, WaitAll
from opentinker.sampling.params import SamplingParams
from opentinker.training.limits import above
from opentinker.training.losses import CrossEntropy
from opentinker.training.policy import Policy
from opentinker.training.tuning import AdamW, Full, JobOptions, LoRA, ServerOptions, Tuning

LEARNING_RATE = 1e-4


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
    agents: Mapping[str, Any] | None = None
    """Who plays the agents that the environment names. Default: as in training. The reward is that of the
    agents that the run's first policy plays.
    """

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(f"evaluation.{name}", f"must be at least 1, not {value}")
        if isinstance(self.tasks, int) and self.tasks < 1:
            raise invalid("evaluation.tasks", f"must be at least 1, not {self.tasks}")


LATER = {
    "max_staleness": "asynchronous rollouts",
    "resume": "resuming a run",
    "curriculum": "curricula",
}
"""Options of fit() that belong to later versions, by what they are."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"max_staleness": (0,), "resume": (None, False)}

OF_THE_ALGORITHM = {
    "reference": "algorithm=ot.GRPO(kl=ot.KLPenalty(reference=...))",
    "kl": "algorithm=ot.GRPO(kl=ot.KLPenalty(...))",
    "critic": "algorithm=ot.ActorCritic(critic=ot.Critic(...))",
    "off_policy_correction": "algorithm=ot.GRPO(off_policy_correction=...)",
    "entropy_coefficient": "algorithm=ot.GRPO(entropy_coefficient=...)",
    "epochs": "algorithm=ot.GRPO(epochs=...)",
    "mini_batches": "algorithm=ot.GRPO(mini_batches=...)",
    "advantage": "algorithm=ot.GRPO(advantage=...)",
    "loss": "algorithm=ot.GRPO(loss=...)",
}
"""What people look for in fit() and find in its algorithm."""


def refuse_later(options: Mapping[str, Any]) -> None:
    """UnsupportedOption for options of later versions, InvalidArgument for names that do not exist."""
    for name, value in options.items():
        if name in OF_THE_ALGORITHM:
            raise invalid(name, f"is an option of the algorithm: fit({OF_THE_ALGORITHM[name]})")
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
    tuning: Tuning
    from_checkpoint: str
    algorithm: Algorithm
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
    agents: Mapping[str, Any]
    renderer: str
    stragglers: Stragglers
    split: str
    shuffle: bool
    name: str
    run_dir: Path | None
    loggers: Sequence[Any]
    callbacks: Sequence[Any]
    trainer: ServerOptions | None
    inference: ServerOptions | None
    job: JobOptions | None
    stop_after_constant: int
    stop_after_skipped: int
    logprob_check: float | bool
    progress: bool | None

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[type, ...]] = {
            "tuning": (LoRA, Full),
            "algorithm": (GRPO, ActorCritic),
            "optimizer": (AdamW,),
            "sampling": (SamplingParams,),
            "stragglers": (WaitAll, MinViable),
        }
        for name, allowed in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, allowed):
                known = " and ".join(f"{kind.__name__}(...)" for kind in allowed)
                raise unsupported(name, f"{value!r}: this version has {known} only")
        for name in ("groups_per_step", "steps", "stop_after_constant", "stop_after_skipped"):
            if getattr(self, name) < 1:
                raise invalid(name, f"must be at least 1, not {getattr(self, name)}")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise invalid("checkpoint_every", f"must be at least 1 or None, not {self.checkpoint_every}")
        if not self.sampling.plain and self._has_ratio:
            raise unsupported(
                "sampling",
                "losses with an importance ratio need the logits that the trainer computes: leave penalties, "
                "bad_words, logit_bias and json_schema at their defaults",
            )
        self.sampling.check_tokens_only("sampling")
        _ = self.rollout_sampling  # refuses what cannot be listed
        self._check_algorithm()
        self._check_agents()
        check_name(self.renderer)
        self._check_stragglers()
        if self.sampling.temperature == 0:
            raise invalid(
                "sampling.temperature", "must be above 0 in training: greedy episodes of a task are equal"
            )

    def _check_algorithm(self) -> None:
        """What an algorithm needs of the other options."""
        algorithm = self.algorithm
        if self.sampling.max_tokens is None:
            if algorithm.aggregation == "seq_mean_token_sum_norm" and algorithm.aggregation_tokens is None:
                raise invalid(
                    "algorithm.aggregation_tokens", "is needed where sampling.max_tokens is not set"
                )
            if algorithm.overlong is not None and algorithm.overlong.max_tokens is None:
                raise invalid("algorithm.overlong", "needs max_tokens where sampling has none")
        if self.tuning.value_head and not isinstance(algorithm, ActorCritic):
            raise invalid("tuning.value_head", f"{type(algorithm).__name__} trains no value head")
        if self.logprob_check is not True and self.logprob_check is not False:
            above("logprob_check", self.logprob_check, 0.0)

    def _check_stragglers(self) -> None:
        """That late groups can be sampled from their own version, and are no larger than groups."""
        if isinstance(self.stragglers, WaitAll):
            return
        if isinstance(self.tuning, Full):
            text = "MinViable needs versions that are served beside each other: LoRA(...)"
            raise unsupported("stragglers", text)
        if (self.stragglers.k or 0) > self.algorithm.group_size:
            raise invalid("stragglers.k", f"must be at most the group size, {self.algorithm.group_size}")

    def _check_agents(self) -> None:
        """That somebody is trained, and that no agent is named that is not there."""
        if not isinstance(self.env, str):
            check_cast(self.agents, self.env.agents, self.env.__name__, self.policies[0])
            check_cast(self._evaluated, self.env.agents, self.env.__name__, self.policies[0])
        for field, agents in (("agents", self.agents), ("evaluation.agents", self._evaluated)):
            for agent, player in agents.items():
                self._check_player(player, f"{field}[{agent!r}]")

    def _check_player(self, player: Any, field: str) -> None:
        check_player(player, field)
        if isinstance(player, Policy):
            text = (
                "fit() makes the policies that it trains: give them names; ot.Frozen(policy, version) is one"
            )
            raise invalid(field, f"{text} that stays as it is")
        named = player if isinstance(player, str) else getattr(player, "policy", "")
        if isinstance(named, str) and named and named not in self.policies:
            raise invalid(field, f"no policy {named!r} is trained here; there is {', '.join(self.policies)}")

    @property
    def _evaluated(self) -> Mapping[str, Any]:
        return (self.evaluation.agents if self.evaluation is not None else None) or {}

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that are trained: those that `agents` names, in its order. The first of
        them plays the agents that are not named.
        """
        names = dict.fromkeys(player for player in self.agents.values() if isinstance(player, str))
        return tuple(names) or (MAIN,)

    @property
    def _has_ratio(self) -> bool:
        return not isinstance(self.algorithm.loss, CrossEntropy)

    @property
    def rollout_sampling(self) -> SamplingParams:
        """How training episodes are sampled: what was cut off is returned where the trainer needs to know."""
        return self.sampling.for_training() if self._has_ratio else self.sampling

    @property
    def policy_tuning(self) -> Tuning:
        """Of the trained policy: with a value head where it is its own critic."""
        shared = isinstance(self.algorithm, ActorCritic) and self.algorithm.critic.shared
        return replace(self.tuning, value_head=shared)

    @property
    def critic_tuning(self) -> Tuning | None:
        """Of the critic's own policy; None where it has none."""
        if not isinstance(self.algorithm, ActorCritic) or self.algorithm.critic.shared:
            return None
        return replace(self.algorithm.critic.tuning or self.tuning, value_head=True)

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
            "agents": {agent: describe_player(player) for agent, player in self.agents.items()},
            "model": self.model,
            "tuning": _value(self.tuning),
            "from_checkpoint": self.from_checkpoint,
            "algorithm": {"name": type(self.algorithm).__name__, **_plain(self.algorithm)},
            "groups_per_step": self.groups_per_step,
            "steps": self.steps,
            "learning_rate": getattr(rate, "__name__", repr(rate)) if callable(rate) else rate,
            "optimizer": _plain(self.optimizer),
            "sampling": _plain(self.sampling),
            "seed": self.seed,
            "renderer": self.renderer,
            "stragglers": {"name": type(self.stragglers).__name__, **_plain(self.stragglers)},
            "checkpoint_every": self.checkpoint_every,
            "logprob_check": self.logprob_check,
        }


def _plain(value: Any) -> dict[str, Any]:
    return {each.name: _value(getattr(value, each.name)) for each in fields(value)}


def _value(value: Any) -> Any:
    if isinstance(value, Policy):
        return value.name
    if isinstance(value, partial):
        return {
            "function": _value(value.func),
            **{name: _value(item) for name, item in value.keywords.items()},
        }
    if hasattr(value, "__dataclass_fields__"):
        return {"name": type(value).__name__, **_plain(value)}
    if isinstance(value, Mapping):
        return {str(key): _value(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_value(item) for item in value]
    return getattr(value, "__name__", repr(value)) if callable(value) else value
