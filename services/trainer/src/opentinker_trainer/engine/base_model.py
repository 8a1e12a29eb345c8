"""Loading a base model, and the parts of it that the engine works with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opentinker_kit.errors import ServiceError
from opentinker_kit.models import image_settings
from opentinker_kit.vision import in_tower, model_class
from opentinker_trainer.engine.forward_dtype import widen
from opentinker_trainer.engine.numerics import DTYPES
from opentinker_trainer.engine.vision import Vision
from opentinkerapi.runtime.reasons import Reason

_OUTPUT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model with frozen weights."""

    model: Any
    """The transformers model."""
    path: Path
    """Where it was loaded from."""
    dtype: str
    forward_dtype: str
    """Precision of passes; that of the weights, or wider."""
    attention: str
    device: torch.device
    vocab_size: int
    context_tokens: int
    full_attention: bool
    """Every layer attends to everything before it, so rows may share a prefix."""
    linear_layers: dict[str, tuple[int, int, int]]
    """Leaf name of a linear layer below the output layer -> (count, in features, out features)."""
    weight_count: int
    """Tied weights counted once."""
    tied_names: tuple[str, ...] = ()
    """Names that stand for weights of another name, as the output layer's for the embedding's."""
    vision: Vision | None = None
    """Its image side; None: it takes no images."""

    @property
    def decoder(self) -> Any:
        """The model without its output layer."""
        return decoder_of(self.model)

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias of the output layer."""
        return output_of(self.model)

    @property
    def output_name(self) -> str:
        """What the model calls its output layer."""
        head = self.model.get_output_embeddings()
        names: list[str] = [name for name, module in self.model.named_modules() if module is head]
        return names[0].rpartition(".")[2]

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.output[0].shape[1])

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Name and value of each base weight in a fixed order, without adapters and what they rename."""
        found = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" not in name
        }
        return sorted(found.items())


def load_model(path: Path, dtype: torch.dtype, attention: str, device: torch.device) -> Any:
    """A transformers model in evaluation mode. ServiceError UNKNOWN_MODEL."""
    try:
        model = model_class(image_settings(path)).from_pretrained(
            str(path), dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError) as error:
        text = f"{path} does not hold a causal language model that transformers can load: {error}"
        raise ServiceError(Reason.UNKNOWN_MODEL, text) from error
    model.eval()
    return model.to(device)


def load_base_model(
    path: Path, dtype: str, attention: str, device: torch.device, forward_dtype: str = ""
) -> BaseModel:
    """Load from a directory, without any network.

    ServiceError UNKNOWN_MODEL if it holds no causal language model, UNSUPPORTED_OPTION if its output layer
    does more than a linear map (soft caps, logit scales), which `token_scores` would miss, or if it cannot
    compute in `forward_dtype` (by default `dtype`).
    """
    model = load_model(path, DTYPES[dtype], attention, device)
    model.requires_grad_(False)
    forward_dtype = forward_dtype or dtype
    if forward_dtype != dtype:
        widen(model, decoder_of(model), DTYPES[forward_dtype])
    config = model.config.get_text_config()
    settings = image_settings(path)
    base = BaseModel(
        model,
        path,
        dtype,
        forward_dtype,
        attention,
        device,
        vocab_size=int(config.vocab_size),
        context_tokens=int(getattr(config, "max_position_embeddings", 2048)),
        full_attention=_full_attention(config),
        linear_layers=_linear_layers(model),
        weight_count=sum(parameter.numel() for parameter in model.parameters()),
        tied_names=_tied_names(model),
        vision=Vision(model, settings) if settings is not None else None,
    )
    _check_output_layer(base)
    return base


def decoder_of(model: Any) -> Any:
    """A transformers model without its output layer."""
    return getattr(model, model.base_model_prefix)


def output_of(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [V, H] and bias of a transformers model's output layer."""
    head = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


def _tied_names(model: Any) -> tuple[str, ...]:
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return tuple(sorted(every - {name for name, _ in model.named_parameters()}))


def _full_attention(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not sliding


def _linear_layers(model: Any) -> dict[str, tuple[int, int, int]]:
    head = model.get_output_embeddings()
    found: dict[str, tuple[int, int, int]] = {}
    for name, module in model.named_modules():
        # Leaf names repeat in a vision tower, which is never trained.
        if isinstance(module, nn.Linear) and module is not head and not in_tower(name):
            leaf = name.rpartition(".")[2]
            count = found.get(leaf, (0, 0, 0))[0]
            found[leaf] = (count + 1, module.in_features, module.out_features)
    return dict(sorted(found.items()))


def _check_output_layer(base: BaseModel) -> None:
    ids = torch.arange(1, 9, device=base.device).remainder(base.vocab_size)[None]
    weight, bias = base.output
    with torch.no_grad():
        expected = base.model(input_ids=ids, use_cache=False).logits.float()
        hidden = base.decoder(input_ids=ids, use_cache=False).last_hidden_state
        bias = None if bias is None else bias.to(hidden.dtype)
        given = nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float()
    error = float((expected - given).abs().max())
    if not error <= _OUTPUT_TOLERANCE * max(1.0, float(expected.abs().max())):
        text = (
            f"the output layer of {type(base.model).__name__} is more than a linear map; it cannot be trained"
        )
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="base_model")
