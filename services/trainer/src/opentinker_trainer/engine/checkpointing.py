"""Activation checkpointing: a decoder layer keeps its inputs only, and runs again in the backward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a transformers model that it says can run again; none for models without such."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def recomputing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these layers compute their activations again in the backward pass instead of keeping them.

    transformers' own switch works in training mode only, which turns dropout on. Here a layer's `forward` is
    wrapped for as long as the pass runs: hooks (adapters, FSDP) stay outside of what is run again.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            # The instance's attribute goes, the class's method is there again.
            del layer.forward
