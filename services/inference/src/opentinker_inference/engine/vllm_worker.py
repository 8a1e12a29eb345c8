"""Runs inside vLLM's worker process: swaps weights without writing a merged checkpoint.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by `collective_rpc`. The merge
happens where the weights live, so a swap reads the memory-mapped base and the small adapter and writes
nothing to disk; with tensor parallelism each rank's own weight loaders cut out its shard.

The caller pauses generation and clears the caches first: nothing here guards running requests.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from opentinker_inference.engine.lora import LoraWeights, read_lora
from opentinker_inference.engine.merge import PristineBase


class MergingWorker:
    """Worker extension. Attribute and method names carry `opentinker` to stay clear of vLLM's own."""

    model_runner: Any
    vllm_config: Any
    _opentinker_base: PristineBase | None = None
    _opentinker_dirty: tuple[str, ...] = ()
    _opentinker_replaced: bool = False
    _opentinker_staged: "LoraWeights | PristineBase | None" = None

    def opentinker_stage_adapter(self, adapter_dir: str) -> int:
        """Read an adapter into memory ahead of the swap, while generation still runs.

        An empty `adapter_dir` stages the base model itself. Returns the number of layers changed.
        """
        self._opentinker_staged = read_lora(Path(adapter_dir)) if adapter_dir else LoraWeights(0, ())
        return len(self._opentinker_staged.modules)

    def opentinker_stage_model(self, directory: str) -> int:
        """Open the files of a whole model ahead of the swap. Returns the number of tensors."""
        self._opentinker_staged = PristineBase(Path(directory))
        return len(self._opentinker_staged.names())

    def opentinker_swap(self, model_dir: str) -> int:
        """Load what was staged into the running model. Returns the number of tensors written.

        An adapter is merged into the base: layers that an earlier one changed and this one does not go back
        to the base. Only whole fused layers can be loaded, so a layer's fused siblings come along from the
        base. After a whole model every tensor of the base is written.
        """
        staged = self._opentinker_staged
        if staged is None:
            raise RuntimeError("nothing was staged")
        dtype: torch.dtype = self.vllm_config.model_config.dtype
        changed: tuple[str, ...] = ()
        whole = isinstance(staged, PristineBase)
        if isinstance(staged, PristineBase):
            tensors = staged.cast(staged.names(), dtype)
        else:
            base = self._opentinker_base or PristineBase(Path(model_dir))
            self._opentinker_base = base
            changed = tuple(sorted(module.name for module in staged.modules))
            tensors = self._merged(staged, base, dtype, changed)
        written = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal written
            for item in tensors:
                written += 1
                yield item

        with torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=counted())
            if whole or self._opentinker_replaced:
                self._pack_output_again()
        self._opentinker_replaced = whole
        self._opentinker_dirty = changed
        self._opentinker_staged = None
        return written

    def _pack_output_again(self) -> None:
        """Where the output layer is the embedding, a reload writes the embedding and forgets what was made of
        it for the output: on CPU a packed copy, which would go on giving the old logits.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def _merged(
        self, staged: LoraWeights, base: PristineBase, dtype: torch.dtype, changed: tuple[str, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        by_name = {f"{module.name}.weight": module for module in staged.modules}
        if self._opentinker_replaced:
            touched = base.names()
        else:
            modules = _with_siblings({*changed, *self._opentinker_dirty}, set(base.names()))
            touched = [f"{name}.weight" for name in modules]
        for name in touched:
            module = by_name.get(name)
            if module is None:
                yield from base.cast([name], dtype)
            else:
                yield from base.merged(LoraWeights(staged.rank, (module,)), dtype)


# Projections that vLLM fuses into one parameter, for the model families it serves with LoRA.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _with_siblings(modules: set[str], checkpoint_names: set[str]) -> list[str]:
    from opentinker_inference.engine.lora import layer_order

    wanted = set(modules)
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        for group in _FUSED:
            if leaf in group:
                siblings = (f"{parent}.{other}" for other in group)
                wanted.update(s for s in siblings if f"{s}.weight" in checkpoint_names)
    return sorted(wanted, key=layer_order)
