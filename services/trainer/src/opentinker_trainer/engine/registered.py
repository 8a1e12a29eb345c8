"""Formulas of the registered losses, whose names and options are in `domain/registered.py`.

Tensors are [N]; a formula gives each token's loss, differentiable, and metrics of tokens.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from opentinker_trainer.domain.registered import Art, PrimeRl, RegisteredLoss, ReinforceIs, Vespo
from opentinker_trainer.engine.policy_losses import (
    CLIPPED,
    chosen,
    probability_is_near,
    weighted_logprob,
)
from opentinker_trainer.engine.token_inputs import (
    LOG_RATIO_BOUND,
    TokenInputs,
    TokenMetrics,
    base_logprobs,
    given,
    log_ratio,
)

Formula = Callable[[RegisteredLoss, Tensor, TokenInputs], tuple[Tensor, TokenMetrics]]
_Options = TypeVar("_Options", bound=RegisteredLoss)
_FORMULAS: dict[type[RegisteredLoss], Formula] = {}


def formula(
    kind: type[_Options],
) -> Callable[[Callable[[_Options, Tensor, TokenInputs], tuple[Tensor, TokenMetrics]]], Formula]:
    """Say how a registered loss is computed."""

    def register(compute: Callable[[_Options, Tensor, TokenInputs], tuple[Tensor, TokenMetrics]]) -> Formula:
        def call(
            options: RegisteredLoss, logprobs: Tensor, inputs: TokenInputs
        ) -> tuple[Tensor, TokenMetrics]:
            assert isinstance(options, kind)
            return compute(options, logprobs, inputs)

        _FORMULAS[kind] = call
        return call

    return register


def registered_losses(
    loss: RegisteredLoss, logprobs: Tensor, inputs: TokenInputs
) -> tuple[Tensor, TokenMetrics]:
    """The loss of each token, and metrics."""
    return _FORMULAS[type(loss)](loss, logprobs, inputs)


@formula(PrimeRl)
def _prime_rl(options: PrimeRl, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    behavior, advantages = given(inputs.behavior_logprobs), given(inputs.advantages)
    near = probability_is_near(logprobs, behavior, advantages, options.mask_low, options.mask_high)
    d = log_ratio(logprobs, behavior)
    losses = -d.exp() * near * advantages + options.kl_tau * d.square()
    return losses, {CLIPPED: ~near & (advantages != 0)}


@formula(ReinforceIs)
def _reinforce_is(options: ReinforceIs, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    ratio = log_ratio(logprobs, given(inputs.behavior_logprobs)).exp()
    return weighted_logprob(ratio, options.ratio_min, options.ratio_max, given(inputs.advantages), logprobs)


@formula(Art)
def _art(options: Art, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    ratio = log_ratio(logprobs, base_logprobs(inputs)).exp()
    low, high = 1 - options.epsilon, 1 + options.epsilon_high
    return weighted_logprob(ratio, low, high, given(inputs.advantages), logprobs)


@formula(Vespo)
def _vespo(options: Vespo, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    advantages = given(inputs.advantages)
    total = inputs.sequence_sums(log_ratio(logprobs, base_logprobs(inputs)).detach())
    total = total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    good = advantages >= 0
    power = chosen(good, options.k_positive, options.k_negative, total)
    decay = chosen(good, options.lambda_positive, options.lambda_negative, total)
    weight = (power * total + decay * (1 - total.exp())).exp()
    return -weight * advantages * logprobs, {}
