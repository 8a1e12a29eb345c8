"""Runs inside vLLM's worker process: swaps merged weights without writing a merged checkpoint.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls it by `collective_rpc`. The merge
happens where the weights live, so a swap reads the memory-mapped base and the small adapter and writes
nothing to disk; with tensor parallelism each rank's own weight loaders cut out its shard.

The caller pauses generation and clears the caches first: nothing here guards running requests.
"""

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
    _opentinker_staged: LoraWeights | None = None

    def opentinker_stage_adapter(self, adapter_dir: str) -> int:
        """Read an adapter into memory ahead of the swap, while generation still runs.

        An empty `adapter_dir` stages the base model itself. Returns the number of layers changed.
        """
        self._opentinker_staged = read_lora(Path(adapter_dir)) if adapter_dir else LoraWeights(0, ())
        return len(self._opentinker_staged.modules)

    def opentinker_swap(self, model_dir: str) -> int:
        """Load base + staged adapter into the running model. Returns the number of tensors written.

        Layers that an earlier adapter changed and this one does not go back to the base. Only whole fused
        layers can be loaded, so a layer's fused siblings come along from the base.
        """
        staged = self._opentinker_staged
        if staged is None:
            raise RuntimeError("no adapter was staged")
        if self._opentinker_base is None:
            self._opentinker_base = PristineBase(Path(model_dir))
        base = self._opentinker_base
        dtype: torch.dtype = self.vllm_config.model_config.dtype
        changed = {module.name for module in staged.modules}
        touched = _with_siblings(changed | set(self._opentinker_dirty), set(base.names()))
        written = 0

        def weights() -> Any:
            nonlocal written
            by_name = {module.name: module for module in staged.modules}
            for name in touched:
                module = by_name.get(name)
                one = LoraWeights(staged.rank, (module,)) if module is not None else None
                source = base.merged(one, dtype) if one is not None else base.pristine([name], dtype)
                for item in source:
                    written += 1
                    yield item

        with torch.inference_mode():
            self.model_runner.reload_weights(weights_iterator=weights())
        self._opentinker_dirty = tuple(sorted(changed))
        self._opentinker_staged = None
        return written


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
