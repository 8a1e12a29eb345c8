"""An engine of a few lines, to see what the front makes of crashes, faults and divergence."""

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import MemoryObjectStore, ObjectInfo
from opentinker_trainer.domain.tuning import LinearLayer, ModelShape, TuningSpec
from opentinker_trainer.ports import ModelInfo, Restored, Saved
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2

NOW = timedelta()
SHAPE = ModelShape({"q_proj": LinearLayer(1, 8, 8)}, LinearLayer(1, 8, 512), 4160, True)


class FakeEngine:
    """State is the list of what happened; `interfere` is asked before each call."""

    def __init__(
        self,
        interfere: Callable[[str], None] = lambda _: None,
        slices_of: Callable[[int], int] = lambda _samples: 1,
    ) -> None:
        self._interfere = interfere
        self._slices_of = slices_of
        self._open: dict[str, tuple[pb.TrainBeginRequest, int]] = {}
        self.turns: list[str] = []
        """Whose slices ran, in order."""
        self.history: dict[str, list[str]] = {}
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def _enter(self, what: str, policy: str = "") -> None:
        try:
            self._interfere(what)
        except ConnectionError:
            if not self.exited.done():
                self.exited.set_result(-9)
        if self.exited.done():
            raise ServiceError(Reason.ENGINE_CRASHED)
        if policy and policy not in self.history:
            raise ServiceError(Reason.POLICY_NOT_FOUND)

    async def start(self) -> ModelInfo:
        return ModelInfo(512, 128, SHAPE)

    async def create_policy(self, policy: str, spec: TuningSpec, seed: int) -> None:
        self._enter("create")
        self.history[policy] = [f"seed {seed}"]

    async def drop_policy(self, policy: str) -> None:
        self.history.pop(policy, None)

    async def begin(self, request: pb.TrainBeginRequest) -> int:
        if self.exited.done():
            raise ServiceError(Reason.ENGINE_CRASHED)
        opened = getattr(request, request.WhichOneof("pass") or "")
        if opened.policy not in self.history:
            raise ServiceError(Reason.POLICY_NOT_FOUND)
        self._open[opened.policy] = (request, self._slices_of(len(opened.samples)))
        return self._open[opened.policy][1]

    async def advance(self, policy: str) -> pb.TrainAdvanceResponse:
        request, left = self._open[policy]
        kind = request.WhichOneof("pass") or ""
        self.turns.append(policy)
        self._enter(kind, policy)
        await asyncio.sleep(0.001)
        if left > 1:
            self._open[policy] = (request, left - 1)
            return pb.TrainAdvanceResponse()
        del self._open[policy]
        if kind == "forward":
            return pb.TrainAdvanceResponse(forward=pb.TrainForwardResponse())
        self.history[policy].append(f"gradient of {len(request.forward_backward.samples)}")
        return pb.TrainAdvanceResponse(forward_backward=pb.TrainForwardBackwardResponse())

    async def optim_step(self, request: pb.TrainOptimStepRequest) -> pb.TrainOptimStepResponse:
        self._enter("optim_step", request.policy)
        self.history[request.policy].append("step")
        count = self.history[request.policy].count("step")
        return pb.TrainOptimStepResponse(result=operation_pb2.OptimStepResult(step=count))

    async def save(self, policy: str, directory: Path, *, adapter_only: bool) -> Saved:
        self._enter("save", policy)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "weights").write_text(json.dumps(self.history[policy]))
        return Saved(("weights",), NOW)

    async def restore(
        self, policy: str, directory: Path, *, weights_only: bool, drop_gradient: bool
    ) -> Restored:
        self._enter("restore", policy)
        self.history[policy] = json.loads((directory / "weights").read_text())
        return Restored(self.history[policy].count("step"), NOW)

    async def close(self) -> None:
        if not self.exited.done():
            self.exited.set_result(0)


class FlakyStore(MemoryObjectStore):
    """An object store that can be away; `away` says for which keys."""

    def __init__(self) -> None:
        super().__init__()
        self.away: Callable[[str], bool] = lambda _: False

    def _check(self, key: str) -> None:
        if self.away(key):
            raise ServiceError(Reason.STORAGE_UNAVAILABLE)

    async def put(self, key: str, data: bytes | Path, content_type: str | None = None) -> ObjectInfo:
        self._check(key)
        return await super().put(key, data, content_type)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        self._check(key)
        return await super().put_if_absent(key, data)

    async def get(self, key: str) -> bytes:
        self._check(key)
        return await super().get(key)
