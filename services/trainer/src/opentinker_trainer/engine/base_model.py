"""Loading a base model, and the parts of it that the engine works with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from opentinker_kit.errors import ServiceError
from opentinker_trainer.engine.numerics import DTYPES
from opentinkerapi.runtime.reasons import Reason

_OUTPUT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A causal language model with frozen weights."""

    model: Any
    """The transformers model."""
    vocab_size: int
    context_tokens: int
    full_attention: bool
    """Every layer attends to everything before it, so rows may share a prefix."""
    linear_layers: dict[str, tuple[int, int, int]]
    """Leaf name of a linear layer below the output layer -> (count, in features, out features)."""

    @property
    def decoder(self) -> Any:
        """The model without its output layer."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias of the output layer."""
        head = self.model.get_output_embeddings()
        return head.weight, getattr(head, "bias", None)

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Name and value of each base weight in a fixed order, without adapters and what they rename."""
        found = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" not in name
        }
        return sorted(found.items())


def load_base_model(path: Path, dtype: str, attention: str) -> BaseModel:
    """Load from a directory, without any network.

    ServiceError UNKNOWN_MODEL if it holds no causal language model, UNSUPPORTED_OPTION if its output layer
    does more than a linear map (soft caps, logit scales), which `token_scores` would miss.
    """
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError) as error:
        text = f"{path} does not hold a causal language model that transformers can load: {error}"
        raise ServiceError(Reason.UNKNOWN_MODEL, text) from error
    model.eval()
    model.requires_grad_(False)
    config = model.config.get_text_config()
    base = BaseModel(
        model,
        vocab_size=int(config.vocab_size),
        context_tokens=int(getattr(config, "max_position_embeddings", 2048)),
        full_attention=_full_attention(config),
        linear_layers=_linear_layers(model),
    )
    _check_output_layer(base)
    return base


def _full_attention(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not sliding


def _linear_layers(model: Any) -> dict[str, tuple[int, int, int]]:
    head = model.get_output_embeddings()
    found: dict[str, tuple[int, int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            leaf = name.rpartition(".")[2]
            count = found.get(leaf, (0, 0, 0))[0]
            found[leaf] = (count + 1, module.in_features, module.out_features)
    return dict(sorted(found.items()))


def _check_output_layer(base: BaseModel) -> None:
    ids = torch.arange(1, 9).remainder(base.vocab_size)[None]
    weight, bias = base.output
    with torch.no_grad():
        expected = base.model(input_ids=ids, use_cache=False).logits.float()
        hidden = base.decoder(input_ids=ids, use_cache=False).last_hidden_state
        given = nn.functional.linear(hidden, weight, bias).float()
    error = float((expected - given).abs().max())
    if not error <= _OUTPUT_TOLERANCE * max(1.0, float(expected.abs().max())):
        text = (
            f"the output layer of {type(base.model).__name__} is more than a linear map; it cannot be trained"
        )
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="base_model")
