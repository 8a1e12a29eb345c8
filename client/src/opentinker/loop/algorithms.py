"""Algorithms of `fit()`: how rewards become advantages, and advantages an objective.

Every option changes something or is refused. What they mean in formulas: docs/algorithms.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from opentinker.errors import invalid
from opentinker.training import advantages
from opentinker.training.advantages import GAE, Advantage, Singleton
from opentinker.training.aggregation import Mode
from opentinker.training.corrections import Correction
from opentinker.training.episodes import ZeroVariance
from opentinker.training.kl import AdaptiveKL
from opentinker.training.limits import above, at_least
from opentinker.training.losses import PPO, CrossEntropy, Loss, PolicyLoss, Registered
from opentinker.training.policy import Policy
from opentinker.training.token_losses import Estimator, check_estimator
from opentinker.training.tuning import AdamW, Tuning

Schedule = float | Callable[[int], float]
"""A number, or a pure function of the step (1, 2, 3 ...), so that resuming needs no state."""

ESTIMATORS: Mapping[str, Advantage] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "grpo_loo": advantages.grpo_loo,
    "maxrl": advantages.maxrl,
    "grpo_passk": advantages.grpo_passk,
    "opo": advantages.opo,
    "gpg": advantages.gpg,
    "reinforce_plus_plus": advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "grpo_per_turn": advantages.grpo_per_turn,
}
"""Estimators by name; each is a function of `opentinker.advantages` with its defaults."""


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """What holds the policy near a reference: the model without its adapter, or a frozen policy.

    "loss": a term of the objective with its own gradient. "reward": coefficient * estimate is taken off the
    reward of each token. "advantage": it is taken off the advantages, centred over the batch, so that only
    differences count.
    """

    where: Literal["loss", "reward", "advantage"] = "loss"
    estimator: Estimator | None = None
    """Default: k3 in the loss, k1 elsewhere, where k1 is unbiased and no gradient flows through it."""
    coefficient: float | AdaptiveKL = 1e-3
    """A number, or a controller that keeps the divergence near a target."""
    reference: Policy | None = None
    """Default: the base model as it was loaded."""
    importance_weighted: bool = False
    """In the loss: unbiased where the batch is from an older policy."""

    def __post_init__(self) -> None:
        if self.where not in ("loss", "reward", "advantage"):
            raise invalid("kl.where", f"must be 'loss', 'reward' or 'advantage', not {self.where!r}")
        if self.estimator is not None:
            check_estimator(self.estimator)
        if not isinstance(self.coefficient, AdaptiveKL):
            above("kl.coefficient", self.coefficient, 0.0)
        if self.reference is not None and not isinstance(self.reference, Policy):
            raise invalid("kl.reference", f"must be a policy, not {self.reference!r}")
        if self.where != "loss" and self.estimator == "k3_straight_through":
            raise invalid("kl.estimator", "no gradient flows through it here; its value is that of 'k3'")
        if self.where != "loss" and self.importance_weighted:
            raise invalid("kl.importance_weighted", "is for a term of the loss only")

    @property
    def chosen(self) -> Estimator:
        """The estimator, by default that of the place."""
        return self.estimator or ("k3" if self.where == "loss" else "k1")


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft punishment: the reward falls on a line, by `factor` in all, over the last `buffer_tokens`
    of the tokens that an episode may sample.
    """

    buffer_tokens: int
    max_tokens: int | None = None
    """Default: `sampling.max_tokens`, for episodes of one turn."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        advantages.overlong_penalty(
            [1],
            max_tokens=self.max_tokens if self.max_tokens is not None else max(self.buffer_tokens, 1),
            buffer_tokens=self.buffer_tokens,
            factor=self.factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What algorithms have in common: what is minimized once tokens have advantages."""

    loss: Loss = field(default_factory=PPO)
    """A policy loss, or one registered with the trainer by name."""
    aggregation: Mode = "token_mean"
    """How token losses become one number; the same for every component."""
    aggregation_tokens: int | None = None
    """What "seq_mean_token_sum_norm" divides a sequence's sum by. Default: `sampling.max_tokens`."""
    kl: KLPenalty | None = None
    entropy_coefficient: float = 0.0
    """Of an entropy bonus."""
    off_policy_correction: Correction | None = None
    """The same as `loss`'s `correction`: give it in one place."""
    epochs: int = 1
    """Passes over a batch."""
    mini_batches: int = 1
    """Optimizer steps a pass: the batch's rows are dealt into so many parts, anew in each pass."""
    overlong: Overlong | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.loss, PolicyLoss | CrossEntropy | Registered):
            raise invalid("loss", f"{self.loss!r} is no policy loss; KL and entropy terms have options here")
        if self.aggregation not in get_args(Mode):
            raise invalid(
                "aggregation", f"must be one of {', '.join(get_args(Mode))}, not {self.aggregation!r}"
            )
        if self.aggregation_tokens is not None:
            if self.aggregation != "seq_mean_token_sum_norm":
                raise invalid("aggregation_tokens", f"has no meaning with {self.aggregation!r}")
            at_least("aggregation_tokens", self.aggregation_tokens, 1)
        if self.kl is not None and not isinstance(self.kl, KLPenalty):
            raise invalid("kl", f"must be a KLPenalty(...), not {self.kl!r}")
        at_least("entropy_coefficient", self.entropy_coefficient, 0.0)
        at_least("epochs", self.epochs, 1)
        at_least("mini_batches", self.mini_batches, 1)
        self._check_correction()

    def _check_correction(self) -> None:
        if self.off_policy_correction is None:
            return
        if not isinstance(self.off_policy_correction, Correction):
            raise invalid("off_policy_correction", f"{self.off_policy_correction!r} is no correction")
        if not isinstance(self.loss, PolicyLoss):
            raise invalid("off_policy_correction", f"needs a policy loss, not {self.loss!r}")
        if self.loss.correction is not None:
            raise invalid("off_policy_correction", "the loss has a correction already")

    @property
    def policy_loss(self) -> Loss:
        """The loss with its correction."""
        if self.off_policy_correction is None:
            return self.loss
        assert isinstance(self.loss, PolicyLoss)
        return replace(self.loss, correction=self.off_policy_correction)

    @property
    def updates(self) -> int:
        """Optimizer steps on a batch."""
        return self.epochs * self.mini_batches

    @property
    def needs_proximal(self) -> bool:
        """Whether the trainer scores the batch before the first update: what later ratios are taken to."""
        return self.updates > 1 or "proximal_logprobs" in self.policy_loss.needs

    @property
    def kl_shapes(self) -> bool:
        """Whether advantages depend on the KL to the reference."""
        return self.kl is not None and self.kl.where != "loss"


@dataclass(frozen=True, slots=True)
class GRPO(Objective):
    """Group-relative policy optimization: G episodes of each task are compared with each other.

    `advantage` is the name of an estimator (grpo, dr_grpo, rloo ...), or a function: one of
    `opentinker.advantages` with options by functools.partial, or your own. `ddof`, `eps` and `singleton` are
    those of `advantages.grpo`. Groups whose rewards are all equal teach nothing: with `zero_variance` "keep"
    their tokens count in the loss's denominator, with "drop" they do not.
    """

    group_size: int = 8
    advantage: str | Advantage = "grpo"
    eps: float = 1e-6
    ddof: int = 1
    singleton: Singleton = "zero"
    zero_variance: ZeroVariance = "keep"

    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        at_least("group_size", self.group_size, 1)
        if self.zero_variance not in ("keep", "drop"):
            raise invalid("zero_variance", f"must be 'keep' or 'drop', not {self.zero_variance!r}")
        if isinstance(self.advantage, str) and self.advantage not in ESTIMATORS:
            raise invalid(
                "advantage", f"must be a function or one of {', '.join(ESTIMATORS)}, not {self.advantage!r}"
            )
        if not (isinstance(self.advantage, str) or callable(self.advantage)):
            raise invalid("advantage", f"must be a name or a function, not {self.advantage!r}")
        if self.advantage != "grpo" and (self.eps, self.ddof, self.singleton) != (1e-6, 1, "zero"):
            raise invalid(
                "advantage",
                "eps, ddof and singleton are options of 'grpo'; give others theirs by "
                "functools.partial(ot.advantages.rloo, singleton='raw')",
            )
        _probe(self.estimator, self.group_size)

    @property
    def estimator(self) -> Advantage:
        """The function that gives advantages."""
        if self.advantage == "grpo":
            return partial(advantages.grpo, eps=self.eps, ddof=self.ddof, singleton=self.singleton)
        return ESTIMATORS[self.advantage] if isinstance(self.advantage, str) else self.advantage


@dataclass(frozen=True, slots=True)
class Critic:
    """The value model: a linear head on a policy's last hidden state, trained on returns.

    On a policy of its own over the same base (`shared` False), with its own tuning, optimizer and learning
    rate, on the same trainer server; or on the policy that is trained, with one objective for both.
    """

    shared: bool = False
    coefficient: float = 0.5
    """Of the value loss in the common objective, where shared."""
    clip: float | None = 0.2
    """How far from the old value a new one may count. None: no clip."""
    tuning: Tuning | None = None
    """Of its own policy. Default: as the trained policy's."""
    learning_rate: Schedule | None = None
    """Of its own policy. Default: as the trained policy's."""
    optimizer: AdamW | None = None
    """Of its own policy. Default: as the trained policy's."""
    warmup: int = 0
    """First steps in which its own policy learns alone: advantages from an untrained critic are noise."""

    def __post_init__(self) -> None:
        above("critic.coefficient", self.coefficient, 0.0)
        if self.clip is not None:
            above("critic.clip", self.clip, 0.0)
        at_least("critic.warmup", self.warmup, 0)
        if self.shared:
            for name, neutral in {
                "tuning": None,
                "learning_rate": None,
                "optimizer": None,
                "warmup": 0,
            }.items():
                if getattr(self, name) != neutral:
                    raise invalid(f"critic.{name}", "is for a critic with a policy of its own (shared=False)")
        elif self.coefficient != 0.5:
            raise invalid("critic.coefficient", "is for a shared critic; its own has a learning rate")


@dataclass(frozen=True, slots=True)
class ActorCritic(Objective):
    """PPO with a critic: a token's advantage is what came after it, less what the critic expected (GAE)."""

    group_size: int = 1
    """Episodes of each task; they are not compared with each other."""
    critic: Critic = field(default_factory=Critic)
    gamma: float = 1.0
    gae_lambda: float = 0.95
    carry_over_gaps: bool = True
    """Carry credit over tokens that the environment wrote (False: as some libraries lose it)."""
    whiten: bool = True
    """Advantages with mean 0 and variance 1 over the tokens of the batch."""

    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        at_least("group_size", self.group_size, 1)
        if not isinstance(self.critic, Critic):
            raise invalid("critic", f"must be a Critic(...), not {self.critic!r}")
        _probe(self.estimator, self.group_size)

    @property
    def estimator(self) -> Advantage:
        """The function that gives advantages and returns."""

        def estimator(token_rewards: Any, values: Any, masks: Any) -> GAE:
            made = advantages.gae(
                token_rewards,
                values,
                masks,
                gamma=self.gamma,
                lam=self.gae_lambda,
                carry_over_gaps=self.carry_over_gaps,
            )
            return GAE(advantages.whiten(made.advantages, masks), made.returns) if self.whiten else made

        estimator.__module__ = advantages.__name__
        vars(estimator)["needs_whole_batch"] = self.whiten
        return estimator

    @property
    def zero_variance(self) -> ZeroVariance:
        """Groups are not compared: all are kept."""
        return "keep"


Algorithm = GRPO | ActorCritic


def _probe(estimator: Advantage, group_size: int) -> None:
    """Try an estimator of ours on groups of that size whose rewards differ, so that a bad option is refused
    now, and so is what could never learn: a group of one has nothing to be compared with.
    """
    function = estimator.func if isinstance(estimator, partial) else estimator
    if not str(getattr(function, "__module__", "")).startswith(advantages.__name__):
        return
    size = min(group_size, 4)
    rewards = [float(index) for index in range(2 * size)]
    made = advantages.estimate(
        estimator,
        advantages.AdvantageInputs(
            rewards=rewards,
            groups=[index // size for index in range(2 * size)],
            masks=[[1]] * (2 * size),
            lengths=[1] * (2 * size),
            token_rewards=[[reward] for reward in rewards],
            turn_rewards=[[reward] for reward in rewards],
            values=[[0.0]] * (2 * size),
        ),
    )
    if not any(row.any() for row in made.advantages):
        raise invalid(
            "group_size",
            f"with {group_size} episode a task every advantage is 0: nothing is compared, nothing learned; "
            "play more episodes, take singleton='raw', or another estimator",
        )
