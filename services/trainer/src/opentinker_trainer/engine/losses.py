"""The losses of a component's tokens, and metrics of them. Every tensor is [N]: loss tokens only."""

import torch
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import (
    Component,
    CrossEntropy,
    Distillation,
    Entropy,
    Kl,
    Loss,
    PolicyLoss,
    Value,
)
from opentinker_trainer.domain.registered import RegisteredLoss
from opentinker_trainer.engine.corrections import correction_weights, drift
from opentinker_trainer.engine.divergences import divergence_losses
from opentinker_trainer.engine.policy_losses import policy_losses
from opentinker_trainer.engine.registered import registered_losses
from opentinker_trainer.engine.token_inputs import TokenInputs, TokenMetrics, given
from opentinkerapi.runtime.reasons import Reason


def token_losses(component: Component, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    """The loss of each token, differentiable, times correction and weight; and the metrics of each token.

    Metrics are of the loss before the weight. ServiceError UNSUPPORTED_OPTION for a value loss of a policy
    without a value head.
    """
    losses, metrics = _losses(component.loss, logprobs, inputs)
    if component.is_policy:
        with torch.no_grad():
            metrics |= drift(logprobs, inputs)
            touched = torch.zeros_like(losses, dtype=torch.bool)
            if component.correction is not None:
                factor, touched = correction_weights(component.correction, inputs)
                metrics["rollout_corr/weight"] = factor
            metrics["rollout_corr/clip_fraction"] = touched
        if component.correction is not None:
            losses = losses * factor
    if inputs.weights is not None:
        # Nothing of a token whose weight is 0 may count, be it infinite.
        losses = torch.where(inputs.weights == 0, 0.0, losses * inputs.weights)
    return losses, metrics


def _losses(loss: Loss, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    match loss:
        case CrossEntropy():
            return -logprobs, {}
        case Kl():
            losses = divergence_losses(loss, logprobs, inputs)
            return losses, {"actor/kl_loss": losses.detach()}
        case Distillation():
            losses = divergence_losses(loss, logprobs, inputs)
            return losses, {"actor/distillation_loss": losses.detach()}
        case Entropy():
            return -given(inputs.entropy), {}
        case Value(clip):
            return _value(clip, inputs)
        case RegisteredLoss():
            return registered_losses(loss, logprobs, inputs)
        case _:
            assert isinstance(loss, PolicyLoss)
            return policy_losses(loss, logprobs, inputs)


def _value(clip: float | None, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2, as PPO with a critic does."""
    if inputs.values is None:
        text = "a value loss needs a policy with a value head (tuning.value_head)"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="losses.value")
    returns = given(inputs.returns)
    plain = (inputs.values - returns).square()
    metrics: TokenMetrics = {"critic/vpred_mean": inputs.values.detach(), "critic/returns_mean": returns}
    worst = plain
    if clip is not None:
        old = given(inputs.old_values)
        near = torch.minimum(torch.maximum(inputs.values, old - clip), old + clip)
        clipped = (near - returns).square()
        worst = torch.maximum(plain, clipped)
        metrics["critic/vf_clipfrac"] = clipped > plain
    losses = 0.5 * worst
    return losses, metrics | {"critic/vf_loss": losses.detach()}
