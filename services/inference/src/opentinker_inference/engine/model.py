"""The deterministic engine's model: a transformers causal LM in eager mode with adapters of our own.

Runs in one thread. Forward passes take explicit positions and masks, and `KvView` caches; nothing here
samples or schedules.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opentinker_inference.domain.images import Images
from opentinker_inference.engine.kv import (
    CHUNK,
    KvShape,
    KvView,
    attend,
    capacity_for,
    padded_length,
    visible,
)
from opentinker_inference.engine.lora import LoraWeights
from opentinker_inference.engine.vision import PromptVision
from opentinker_kit.errors import ServiceError
from opentinker_kit.models import image_settings
from opentinker_kit.vision import in_tower, model_class
from opentinkerapi.runtime.reasons import Reason

ATTENTION = "opentinker_eager"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoraLinear(torch.nn.Module):
    """A linear layer with any number of adapters, of which the model's active one is added.

    The update is computed in float32 and in the order peft uses: `base(x) + scale * B(A(x))`.
    """

    def __init__(self, base: torch.nn.Linear, active: "ActiveKey") -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self._active = active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        adapter = self.adapters.get(self._active.key)
        if adapter is None:
            return out
        lora_a, lora_b, scale = adapter
        linear = torch.nn.functional.linear
        return out + (linear(linear(x.to(torch.float32), lora_a), lora_b) * scale).to(out.dtype)


class ActiveKey:
    """Which adapter the layers of one model add now; "" for none."""

    key: str = ""


class DeterministicModel:
    """Forward passes of one base model under any of its loaded weights.

    `threads` is pinned; `merged` keeps one adapter merged into the weights instead of beside them.
    """

    def __init__(self, model_dir: Path, dtype: str, threads: int, merged: bool) -> None:
        self._threads = threads
        self.pin_threads()
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
        self._model_dir = model_dir
        self._config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        config = self._config.get_text_config()
        _refuse_unknown_attention(config)
        images = image_settings(model_dir)
        self._vision = PromptVision(images) if images is not None else None
        self.dtype = DTYPES[dtype]
        self._model = self._read(model_dir)
        self.vocab_size: int = int(self._model.get_output_embeddings().weight.shape[0])
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.shape = KvShape(int(config.num_hidden_layers), heads, size, self.dtype)
        self._active = ActiveKey()
        self._merged = merged
        self._merged_key = ""
        self._replaced = False
        self._pristine: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = {""}

    def pin_threads(self) -> None:
        """OpenMP counts threads for each calling thread, and sampling sets another number than layers do."""
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    @staticmethod
    def one_thread() -> None:
        """For many small operations: waking a second thread for each costs more than it saves."""
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)

    def linear_weights(self) -> list[torch.Tensor]:
        """One weight [out, in] of each shape among the linear layers, the output's included."""
        layers = [
            layer
            for name, layer in self._model.named_modules()
            if isinstance(layer, torch.nn.Linear) and not in_tower(name)
        ]
        return list({tuple(layer.weight.shape): layer.weight for layer in layers}.values())

    # Weights

    def _read(self, directory: Path) -> Any:
        """The model with the weights of a directory, under the base model's configuration."""
        model = model_class(self._vision.settings if self._vision is not None else None).from_pretrained(
            directory,
            config=self._config,
            dtype=self.dtype,
            # A vision tower keeps to transformers' own: it has no cache and no mask.
            attn_implementation={"text_config": ATTENTION, "vision_config": "eager"}
            if self._vision is not None
            else ATTENTION,
            local_files_only=True,
        )
        model.eval().requires_grad_(False)
        for parameter in model.parameters():
            # Out of the mapped file: where in it a tensor begins decides the last bit of some products.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        return model

    def load_full(self, key: str, directory: Path) -> None:
        """Replace every weight by those of a directory; only in merged mode. A failure changes nothing."""
        self._model = self._read(directory)
        self._pristine.clear()
        self._replaced = True
        self._merged_key = key

    def load(self, key: str, adapter: LoraWeights) -> None:
        """Make `adapter` usable under `key`; in merged mode it replaces what was merged before."""
        # Looked up first, and again in what was restored: a layer that is not there changes nothing.
        layers = [self._linear(module.name) for module in adapter.modules]
        if self._merged:
            self._restore()
            layers = [self._linear(module.name) for module in adapter.modules]
            for module, layer in zip(adapter.modules, layers, strict=True):
                self._pristine[module.name] = layer.base.weight.detach().clone()
                weight = layer.base.weight.to(torch.float32)
                merged = torch.addmm(weight, module.lora_b, module.lora_a, alpha=module.scale)
                layer.base.weight.copy_(merged.to(self.dtype))
            self._merged_key = key
        else:
            for module, layer in zip(adapter.modules, layers, strict=True):
                layer.adapters[key] = (module.lora_a, module.lora_b, module.scale)
            self._loaded.add(key)

    def unload(self, key: str) -> None:
        """Forget an adapter; unknown keys are ignored."""
        if self._merged and key == self._merged_key:
            self._restore()
        self._loaded.discard(key)
        for layer in self._model.modules():
            if isinstance(layer, LoraLinear):
                layer.adapters.pop(key, None)

    def has(self, key: str) -> bool:
        """Whether `key` can be computed with now."""
        return key == self._merged_key if self._merged else key in self._loaded

    def _restore(self) -> None:
        if self._replaced:
            # From the files it was first read from, so that its bits are those of the first time.
            self._model = self._read(self._model_dir)
            self._replaced = False
        for name, weight in self._pristine.items():
            self._linear(name).base.weight.copy_(weight)
        self._pristine.clear()
        self._merged_key = ""

    def _linear(self, name: str) -> LoraLinear:
        try:
            layer = self._model.get_submodule(name)
        except AttributeError:
            layer = None
        if isinstance(layer, LoraLinear):
            return layer
        if not isinstance(layer, torch.nn.Linear):
            raise ServiceError(Reason.INVALID_WEIGHTS, f"the model has no linear layer {name!r}")
        wrapped = LoraLinear(layer, self._active)
        parent, _, leaf = name.rpartition(".")
        setattr(self._model.get_submodule(parent), leaf, wrapped)
        return wrapped

    # Forward passes

    @property
    def images(self) -> bool:
        """Whether prompts may hold images."""
        return self._vision is not None

    def shift(self, length: int, images: Images) -> int:
        """What is added to the place of a token after a prompt of that length to get its position."""
        return 0 if self._vision is None else self._vision.shift(self._model, length, images)

    def step(
        self,
        key: str,
        tokens: Sequence[int],
        positions: Sequence[int],
        cache: KvView,
        shifts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] after one token a row; the cache takes the tokens in at `positions`."""
        where = torch.tensor(positions, dtype=torch.long)[:, None]
        ids = torch.tensor(tokens, dtype=torch.long)[:, None]
        rotary = where if shifts is None else where + torch.tensor(shifts, dtype=torch.long)[:, None]
        hidden = self._forward(key, {"input_ids": ids, "position_ids": rotary}, where, cache)
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[:, 0])
        return logits

    def prefill(
        self, key: str, prompt: Sequence[int], temperature: float | None = None, images: Images = ()
    ) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Run a prompt alone, in chunks whose sizes depend on its length only.

        Returns its cache [layers, 2, heads, capacity, head_size], the logits [vocabulary] after its last
        token, and, where `temperature` is given, the logprob of each token (entry 0 is NaN).
        """
        last = (len(prompt) - 1) % CHUNK + 1
        padded = len(prompt) - last + padded_length(last)
        capacity = capacity_for(max(padded, len(prompt) + 1))
        buffer = self.shape.buffer(1, capacity)
        scores: list[float] = [float("nan")] if temperature is not None else []
        hidden = torch.empty(0)
        for start in range(0, len(prompt), CHUNK):
            chunk = list(prompt[start : start + CHUNK])
            count = len(chunk)
            chunk += [0] * (padded_length(count) - count)
            where = torch.arange(start, start + len(chunk))[None, :]
            inputs = {"input_ids": torch.tensor([chunk]), "position_ids": where}
            if images:
                assert self._vision is not None, "images are refused where there is no vision tower"
                inputs = self._vision.inputs(self._model, chunk, start, images)
            hidden = self._forward(key, inputs, where, KvView(buffer, where))[0]
            if temperature is not None:
                targets = list(prompt[start + 1 : start + count + 1])
                scores += self._scores(hidden, targets, temperature)
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[last - 1 : last])[0]
        return buffer[:, :, 0], logits, scores

    def _scores(self, hidden: torch.Tensor, targets: list[int], temperature: float) -> list[float]:
        if not targets:
            return []
        logits = self._model.get_output_embeddings()(hidden).to(torch.float32) / temperature
        logprobs = torch.log_softmax(logits[: len(targets)], dim=-1)
        picked: list[float] = logprobs.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist()
        return picked

    def _forward(
        self, key: str, inputs: dict[str, torch.Tensor], positions: torch.Tensor, cache: KvView
    ) -> torch.Tensor:
        """Hidden states [rows, tokens, size]; the cache takes the tokens in at `positions` [rows, tokens]."""
        self.pin_threads()
        self._active.key = "" if self._merged else key
        with torch.inference_mode():
            out = self._model.base_model(
                **inputs,
                attention_mask=visible(positions, cache.capacity, self.dtype),
                past_key_values=cache,
                use_cache=True,
            )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden


def _refuse_unknown_attention(config: "AutoConfig") -> None:
    """Masks here are plain causal ones; a model that needs another kind is refused, not served wrongly."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window is not None and not getattr(config, "layer_types", None)):
        raise ServiceError(
            Reason.UNSUPPORTED_COMBINATION,
            f"the transformers engine serves models with full attention in every layer; this one has "
            f"{', '.join(sorted(kinds))}{f' with a window of {window}' if window else ''}; use engine=vllm",
        )
