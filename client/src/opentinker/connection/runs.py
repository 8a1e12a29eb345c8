"""The record of a run at the cluster: metrics, loop state, outcome. Written in the background, never in the
way.

A scheduler that is away must not hold up training: rows wait here and are sent when it is back. Nothing is
sent twice to any effect: a row of a step that is there replaces it.
"""

import asyncio
import contextlib
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

import grpc.aio

from opentinker import errors
from opentinker.connection.calls import ControlPlane
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub

FLUSH_TIMEOUT_S = 30.0
ROWS_A_CALL = 200


class RunRecord:
    """One run of the RunService. Runs on the client's loop."""

    def __init__(self, control: ControlPlane, name: str) -> None:
        self._control = control
        self.name = name
        self._rows: list[run_pb2.MetricsRow] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        # A run that is resumed goes through the same states again.
        self._opened = uuid.uuid4().hex
        self._writer = asyncio.create_task(self._write_for_ever())

    @classmethod
    async def create(
        cls, control: ControlPlane, *, display_name: str, config: Mapping[str, Any], request_id: str
    ) -> "RunRecord":
        """Make a run."""
        run = run_pb2.Run(
            display_name=display_name,
            config_json=json.dumps(config, default=str),
            state=run_pb2.RUN_STATE_ACTIVE,
        )
        request = run_service_pb2.CreateRunRequest(request_id=request_id, run=run)
        response = await control.call(lambda channel: RunServiceStub(channel).CreateRun(request))
        return cls(control, response.run.name)

    async def update(
        self, *, job: str | None = None, state: "run_pb2.RunState.ValueType | None" = None
    ) -> None:
        """Record the job that works on it, or how it ended."""
        request = run_service_pb2.UpdateRunRequest(
            name=self.name,
            request_id=f"update-{self.name}-{job or ''}-{state or 0}-{self._opened}",
            state=state or run_pb2.RUN_STATE_UNSPECIFIED,
        )
        if job is not None:
            request.job = job
        await self._control.call(lambda channel: RunServiceStub(channel).UpdateRun(request))

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step, soon. Values that are not finite cannot be recorded and are left
        out.
        """
        row = run_pb2.MetricsRow(
            step=step, values={name: value for name, value in values.items() if math.isfinite(value)}
        )
        row.time.GetCurrentTime()
        self._rows.append(row)
        self._idle.clear()
        self._wake.set()

    async def put_loop_state(self, step: int, checkpoint: str, state: bytes) -> None:
        """Record what the loop needs to go on from a checkpoint."""
        request = run_service_pb2.PutLoopStateRequest(
            run=self.name,
            request_id=f"loop-{self.name}-{step}",
            loop_state=run_pb2.LoopState(step=step, checkpoint=checkpoint, state=state),
        )

        def call(channel: grpc.aio.Channel) -> Any:
            return RunServiceStub(channel).PutLoopState(request)

        await self._control.call(call)

    @staticmethod
    async def loop_state(control: ControlPlane, run: str) -> run_pb2.LoopState:
        """The newest loop state of a run. NotFound if there is no such run, or none was recorded."""
        request = run_service_pb2.GetLoopStateRequest(run=run)
        response = await control.call(lambda channel: RunServiceStub(channel).GetLoopState(request))
        return response.loop_state

    async def close(self) -> None:
        """Send what waits, for a while, and stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._idle.wait()
        self._writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._writer

    async def _write_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._rows:
                rows = self._rows[:ROWS_A_CALL]
                request = run_service_pb2.AppendMetricsRequest(run=self.name, rows=rows)

                def call(channel: grpc.aio.Channel, request: Any = request) -> Any:
                    return RunServiceStub(channel).AppendMetrics(request)

                # Metrics are also in the run's own file; a scheduler that refuses them does not end the run.
                with contextlib.suppress(errors.OpenTinkerError):
                    await self._control.call(call)
                del self._rows[: len(rows)]
            self._idle.set()
