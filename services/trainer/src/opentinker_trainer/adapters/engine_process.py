"""The engine in a child process, behind the Engine port."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineProcess
from opentinker_trainer import wire
from opentinker_trainer.domain.tuning import LinearLayer, ModelShape, TuningSpec
from opentinker_trainer.ports import ModelInfo, Restored, Saved
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason

MODULES = {"torch": "opentinker_trainer.engine", "noop": "opentinker_trainer.noop_engine"}
"""What `python -m` runs, by engine."""


class ProcessEngine:
    """Speaks for one child. A crashed one is not started again: make a new one."""

    def __init__(
        self,
        engine: str,
        load: pb.TrainLoadRequest,
        *,
        log_path: Path,
        lifeline_fd: int | None,
        more_env: Mapping[str, str] | None = None,
    ) -> None:
        threads = str(load.threads)
        env = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Threads that wait must not keep cores busy: sampler and environments run on the same ones.
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(more_env or {}),
        }
        self._load = load
        self._process = EngineProcess(
            [sys.executable, "-m", MODULES[engine]], env=env, log_path=log_path, lifeline_fd=lifeline_fd
        )

    @property
    def exited(self) -> asyncio.Future[int]:
        return self._process.exited

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    async def start(self) -> ModelInfo:
        await self._process.start()
        try:
            loaded = await self._process.call("Load", self._load, pb.TrainLoadResponse)
        except ServiceError as error:
            if error.reason is not Reason.ENGINE_CRASHED:
                raise
            text = f"the engine died while it loaded; its log ends with: {self._process.log_tail(2000)}"
            raise ServiceError(Reason.ENGINE_CRASHED, text) from error
        shape = ModelShape(
            linear_layers={layer.name: _layer(layer) for layer in loaded.linear_layers},
            output_layer=_layer(loaded.output_layer),
            weight_count=loaded.weight_count,
            activation_checkpointing=loaded.activation_checkpointing,
        )
        return ModelInfo(loaded.vocab_size, loaded.context_tokens, shape, loaded.free_bytes)

    async def create_policy(self, policy: str, spec: TuningSpec, seed: int) -> None:
        request = pb.TrainCreatePolicyRequest(policy=policy, tuning=wire.tuning_message(spec), seed=seed)
        await self._process.call("CreatePolicy", request, pb.TrainCreatePolicyResponse)

    async def drop_policy(self, policy: str) -> None:
        request = pb.TrainDropPolicyRequest(policy=policy)
        await self._process.call("DropPolicy", request, pb.TrainDropPolicyResponse)

    async def begin(self, request: pb.TrainBeginRequest) -> int:
        return (await self._process.call("Begin", request, pb.TrainBeginResponse)).slices

    async def advance(self, policy: str) -> pb.TrainAdvanceResponse:
        request = pb.TrainAdvanceRequest(policy=policy)
        return await self._process.call("Advance", request, pb.TrainAdvanceResponse)

    async def optim_step(self, request: pb.TrainOptimStepRequest) -> pb.TrainOptimStepResponse:
        return await self._process.call("OptimStep", request, pb.TrainOptimStepResponse)

    async def save(self, policy: str, directory: Path, *, adapter_only: bool) -> Saved:
        request = pb.TrainSaveRequest(
            policy=policy, directory=str(directory.absolute()), adapter_only=adapter_only
        )
        saved = await self._process.call("Save", request, pb.TrainSaveResponse)
        return Saved(tuple(saved.files), saved.engine_time.ToTimedelta())

    async def restore(
        self, policy: str, directory: Path, *, weights_only: bool, drop_gradient: bool
    ) -> Restored:
        request = pb.TrainRestoreRequest(
            policy=policy,
            directory=str(directory.absolute()),
            weights_only=weights_only,
            drop_gradient=drop_gradient,
        )
        restored = await self._process.call("Restore", request, pb.TrainRestoreResponse)
        return Restored(restored.step, restored.engine_time.ToTimedelta())

    async def close(self) -> None:
        await self._process.close()


def _layer(message: pb.LinearLayers) -> LinearLayer:
    return LinearLayer(message.count, message.in_features, message.out_features)
