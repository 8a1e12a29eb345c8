"""What one would do instead of publishing: everything in one process with vLLM's AsyncLLM.

A LoRA adapter of rank 16 over all linear layers lies in memory, in float32. For each line of its input
`python -m benchmarks.publish_plain …` changes it and brings it into the engine: merged, saved and reloaded,
or saved and added; then it samples one token.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from opentinker_inference.engine.merge import PristineBase
from opentinker_inference.engine.vllm_engine import VllmEngine
from opentinker_inference.ports import EngineConfig

RANK = 16
ALPHA = 32.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = list(range(100, 135))


class Adapter:
    """Random A and B of every linear layer."""

    def __init__(self, model_dir: Path) -> None:
        import torch

        base = PristineBase(model_dir)
        self.base = {name: base.tensor(name).to(torch.float32) for name in base.names()}
        self.config = (model_dir / "config.json").read_text()
        self.pairs = {
            name.removesuffix(".weight"): (
                torch.randn(RANK, weight.shape[1]) / weight.shape[1] ** 0.5,
                torch.zeros(weight.shape[0], RANK),
            )
            for name, weight in self.base.items()
            if name.removesuffix(".weight").rpartition(".")[2] in TARGETS
        }

    def change(self) -> None:
        import torch

        for _, b in self.pairs.values():
            b += 0.001 * torch.randn_like(b)

    def save(self, directory: Path) -> None:
        """As PEFT does."""
        from safetensors.torch import save_file

        directory.mkdir()
        tensors = {
            f"base_model.model.{name}.lora_{matrix}.weight": tensor
            for name, pair in self.pairs.items()
            for matrix, tensor in zip("AB", pair, strict=True)
        }
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
        (directory / "adapter_config.json").write_text(json.dumps(config))

    def save_merged(self, directory: Path, dtype: str) -> None:
        import torch
        from safetensors.torch import save_file

        directory.mkdir()
        tensors = dict(self.base)
        for name, (a, b) in self.pairs.items():
            tensors[f"{name}.weight"] = torch.addmm(self.base[f"{name}.weight"], b, a, alpha=ALPHA / RANK)
        cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        save_file(cast, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(self.config)


class Plain:
    """The engine, and how weights get into it."""

    def __init__(self, llm: Any, adapter: Adapter, directory: Path, dtype: str, *, merged: bool) -> None:
        self._llm = llm
        self._adapter = adapter
        self._directory = directory
        self._dtype = dtype
        self._bring: Callable[[Path], Awaitable[None]] = self._merge if merged else self._add
        self._lora: Any = None
        self._turn = 0

    async def once(self) -> dict[str, float]:
        self._turn += 1
        self._adapter.change()
        begin = time.perf_counter()
        await self._bring(self._directory / str(self._turn))
        brought = time.perf_counter() - begin
        await self._token()
        seconds = time.perf_counter() - begin
        shutil.rmtree(self._directory / str(self._turn - 1), ignore_errors=True)
        return {"seconds": seconds, "without_token_s": brought}

    async def _merge(self, directory: Path) -> None:
        self._adapter.save_merged(directory, self._dtype)
        await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})

    async def _add(self, directory: Path) -> None:
        from vllm.lora.request import LoRARequest

        self._adapter.save(directory)
        self._lora = LoRARequest(str(self._turn), self._turn, str(directory))
        await self._llm.add_lora(self._lora)

    async def _token(self) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, seed=1, logprobs=0, detokenize=False, ignore_eos=True)
        prompt = {"prompt_token_ids": PROMPT}
        async for _ in self._llm.generate(prompt, params, f"t{self._turn}", lora_request=self._lora):
            pass


async def serve(arguments: argparse.Namespace, directory: Path) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    merged = arguments.serving_mode == "merged"
    engine = VllmEngine(EngineConfig("vllm", arguments.model_dir, 1024, serving_mode=arguments.serving_mode))
    engine._merged = merged
    llm = AsyncLLM.from_engine_args(engine._engine_args(bool(current_platform.is_cpu()), arguments.dtype))
    plain = Plain(llm, Adapter(arguments.model_dir), directory, arguments.dtype, merged=merged)
    answer: dict[str, object] = {"ready": True}
    try:
        while True:
            print(json.dumps(answer), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                return
            answer = dict(await plain.once())
    finally:
        llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--serving-mode", choices=("adapter", "merged"), required=True)
    parser.add_argument("--dtype", default="bfloat16")
    with tempfile.TemporaryDirectory(prefix="ot-bench-") as directory:
        asyncio.run(serve(parser.parse_args(), Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
