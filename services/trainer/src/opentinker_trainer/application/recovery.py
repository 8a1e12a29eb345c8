"""Recovery checkpoints: what a restart goes on from, and what lets the operation log be cut.

The engine writes them to a folder of this host, the upload runs beside the next operations. An engine that
crashed goes on from the local files, a server that died from the newest complete set in the object store;
what came after it is run again from the log.
"""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_trainer.application.executor import STATE_FILE, Executor, write_state
from opentinker_trainer.application.held import HeldPolicy, RecoveryPoint
from opentinker_trainer.application.patience import patiently
from opentinker_trainer.application.store import PolicyStore, recovery_prefix
from opentinker_trainer.domain.policy_state import PolicyState
from opentinker_trainer.domain.queue import Entry, PolicyQueue
from opentinker_trainer.ports import Engine
from opentinker_trainer.wire import tuning_of
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

RESULTS_FILE = "results.binpb"
_RETRY_UPLOAD_S = 2.0


class Recovery:
    """Saves and restores policies."""

    def __init__(self, store: PolicyStore, executor: Executor, clock: Clock, directory: Path) -> None:
        self._store = store
        self._executor = executor
        self._clock = clock
        self._directory = directory

    async def save(self, engine: Engine, policy: HeldPolicy) -> None:
        """Write the engine's state of a policy, and begin to upload it."""
        assert policy.applied_seq is not None
        seq = policy.applied_seq
        if policy.recovery is not None and policy.recovery.seq == seq:
            return
        directory = self._folder(policy) / f"{seq:012d}"
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        saved = await engine.save(policy.name, directory, adapter_only=False)
        kept = pb.KeptResults(
            operations=[policy.results[key] for key in sorted(policy.results) if key <= seq]
        )
        write_state(policy, directory)
        try:
            (directory / RESULTS_FILE).write_bytes(kept.SerializeToString())
        except OSError as error:
            raise ServiceError(Reason.STORAGE_FULL, f"{directory}: {error.strerror}") from error
        older = policy.recovery
        policy.recovery = RecoveryPoint(seq, policy.state, directory)
        policy.steps_at_recovery = policy.state.step
        names = [*saved.files, STATE_FILE, RESULTS_FILE]
        policy.begin(self._upload(policy, policy.recovery, names, older))

    async def flush(self, policy: HeldPolicy) -> None:
        """Wait until everything of a policy that is on its way is in the object store."""
        while pending := [*policy.uploads.values(), *policy.background]:
            await asyncio.gather(*pending, return_exceptions=True)

    async def cut(self, policy: HeldPolicy) -> None:
        """Drop from the log what neither a restart nor the client needs."""
        seqs = policy.queue.cut(min([policy.durable_seq, *(seq - 1 for seq in policy.uploads)]))
        for seq in seqs:
            policy.bodies.pop(seq, None)
        if seqs:
            with contextlib.suppress(ServiceError):  # what stays behind is only longer than needed
                await self._store.forget_operations(policy.name, seqs)

    async def load(self, name: str, job: str, attempt: int) -> HeldPolicy:
        """A policy as the object store has it, not yet in an engine. POLICY_NOT_FOUND."""
        record = await self._store.read_record(name)
        if record is None:
            raise ServiceError(Reason.POLICY_NOT_FOUND, f"there is no policy {name}")
        policy = HeldPolicy(record, tuning_of(record.policy.tuning), job, attempt)
        seqs = await self._store.recovery_seqs(name)
        kept = await self._newest(policy, seqs)
        policy.results = {operation.seq: operation for operation in kept.operations}
        ended = policy.durable_seq
        operations = await self._store.read_log(name)
        known = {operation.seq for operation in operations}
        if not known.issuperset(range(ended + 1, max(seqs, default=0) + 1)):
            text = f"the recovery checkpoint of {name} is damaged, and the log before it is cut"
            raise ServiceError(Reason.DIGEST_MISMATCH, text)
        end = ended
        while end + 1 in known:
            end += 1
        loose = [seq for seq in known if seq > end]
        if loose:
            # Logged out of order when the server died; nobody was told that they are.
            await self._store.forget_operations(name, loose)
        whole = [operation for operation in operations if operation.seq <= end]
        policy.queue = PolicyQueue.restored(
            [Entry(operation.seq, operation.request_id, operation.digest) for operation in whole],
            ended_seq=ended,
            acked_seq=min(policy.results, default=ended + 1) - 1,
        )
        policy.bodies = {operation.seq: operation for operation in whole if operation.seq > ended}
        policy.poisoned = await self._store.read_poisoned(name)
        running = await self._store.read_running(name)
        if running is not None and running.seq > ended:
            policy.crashes[running.seq] = running.crashes + 1
        log.info("policy loaded", policy=name, recovery_seq=ended, logged_seq=end)
        return policy

    async def bring_up(self, engine: Engine, policy: HeldPolicy) -> None:
        """Have an engine hold the policy as of its newest recovery point, or as it was made."""
        await engine.create_policy(policy.name, policy.spec, policy.record.policy.seed)
        point = policy.recovery
        if point is not None:
            if not point.directory.exists():
                await patiently(
                    self._clock,
                    lambda: self._store.fetch_set(recovery_prefix(policy.name, point.seq), point.directory),
                )
            await engine.restore(policy.name, point.directory, weights_only=False, drop_gradient=False)
            policy.state, policy.applied_seq = point.state, point.seq
            return
        step = 0
        if policy.record.from_checkpoint:
            step, _, _ = await self._executor.load_checkpoint(
                engine, policy, policy.record.from_checkpoint, weights_only=False
            )
        elif policy.record.import_files:
            await self._executor.import_weights(engine, policy)
        policy.state, policy.applied_seq = PolicyState(step=step), 0

    async def _newest(self, policy: HeldPolicy, seqs: list[int]) -> pb.KeptResults:
        """Fetch the first of some recovery checkpoints that is whole."""
        for seq in seqs:
            directory = self._folder(policy) / f"{seq:012d}"
            try:
                await self._store.fetch_set(recovery_prefix(policy.name, seq), directory)
            except ServiceError as error:
                if error.reason is not Reason.DIGEST_MISMATCH:
                    raise
                log.error("recovery checkpoint is damaged", policy=policy.name, seq=seq, error=error.message)
                continue
            state = PolicyState.from_json(json.loads((directory / STATE_FILE).read_text()))
            policy.recovery = RecoveryPoint(seq, state, directory)
            policy.durable_seq = seq
            policy.steps_at_recovery = state.step
            return pb.KeptResults.FromString((directory / RESULTS_FILE).read_bytes())
        return pb.KeptResults()

    async def _upload(
        self, policy: HeldPolicy, point: RecoveryPoint, names: list[str], older: RecoveryPoint | None
    ) -> None:
        # What a restart goes on from must not lie behind a version that only this host has: its files would
        # not be made again.
        while pending := [task for seq, task in policy.uploads.items() if seq <= point.seq]:
            await asyncio.wait(pending)
        prefix = recovery_prefix(policy.name, point.seq)
        facts = {"policy": policy.name, "kind": "recovery", "seq": point.seq, "step": point.state.step}
        while True:
            try:
                # Another process may have been here before; its set is as good, results may differ.
                if await self._store.find_manifest(prefix) is None:
                    await self._store.save_set(prefix, point.directory, names, facts)
                break
            except ServiceError as error:
                log.warning("upload of a recovery checkpoint waits", prefix=prefix, reason=error.reason)
                await self._clock.sleep(_RETRY_UPLOAD_S)
        policy.durable_seq = max(policy.durable_seq, point.seq)
        await self.cut(policy)
        with contextlib.suppress(ServiceError):
            for seq in await self._store.recovery_seqs(policy.name):
                if seq < policy.durable_seq:
                    await self._store.delete_set(recovery_prefix(policy.name, seq))
        if older is not None:
            await asyncio.to_thread(shutil.rmtree, older.directory, ignore_errors=True)

    def _folder(self, policy: HeldPolicy) -> Path:
        return self._directory / policy.id
