"""Running one operation: engine, object store and catalog, in the order that makes a crash harmless.

What an operation changes outside the engine is written so that running it again changes nothing: versions and
checkpoints have names that follow from the policy's state and the seq, and are created once.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.image_blobs import inline_images
from opentinker_trainer.application.held import HeldPolicy
from opentinker_trainer.application.imports import fetch_import
from opentinker_trainer.application.patience import patiently
from opentinker_trainer.application.publishing import Publisher
from opentinker_trainer.application.store import PolicyStore
from opentinker_trainer.domain.manifest import MANIFEST, Manifest
from opentinker_trainer.domain.names import checkpoint_policy
from opentinker_trainer.domain.tuning import tuning_facts
from opentinker_trainer.ports import Catalog, Engine
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import train_sample_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2

log = structlog.get_logger()

STATE_FILE = "front.json"
_INLINE_RESULT_BYTES = 8 * 2**20
"""Per-token results beyond this go into a blob: a message holds 16 MiB."""

_FOR_EVER_S = float("inf")
_ABOUT_WEIGHTS = (Reason.CHECKPOINT_NOT_FOUND, Reason.DIGEST_MISMATCH, Reason.INVALID_WEIGHTS)

Samples = list[train_sample_pb2.TrainSample]


async def samples_of(
    store: PolicyStore, chunks: Sequence[trainer_service_pb2.SampleChunk], project: str
) -> Samples:
    """The samples of an operation; those in blobs of the project, and images in them, fetched."""
    samples: Samples = []
    for chunk in chunks:
        content = chunk
        if chunk.HasField("blob"):
            content = trainer_service_pb2.SampleChunk.FromString(await store.read_blob(chunk.blob, project))
        samples.extend(content.samples)
    for index, sample in enumerate(samples):
        fetched = await inline_images(store.objects, sample.chunks, f"samples[{index}]", project)
        if fetched is not None:
            samples[index] = train_sample_pb2.TrainSample()
            samples[index].CopyFrom(sample)
            del samples[index].chunks[:]
            samples[index].chunks.extend(fetched)
    return samples


def _length(sample: train_sample_pb2.TrainSample) -> int:
    """In tokens; an image has as many as it takes positions."""
    chunks = sample.chunks
    return sum(len(chunk.tokens.token_ids) // 4 + chunk.image.token_count for chunk in chunks)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Have a refusal name the field of the request that is to blame, where it names none."""
    try:
        yield
    except ServiceError as error:
        if error.reason in _ABOUT_WEIGHTS and not error.field:
            raise ServiceError(error.reason, error.message, field=field, metadata=error.metadata) from error
        raise


def write_state(policy: HeldPolicy, directory: Path) -> None:
    """Write the front's part of a checkpoint. STORAGE_FULL if it cannot be written."""
    try:
        (directory / STATE_FILE).write_text(json.dumps(policy.state.to_json()))
    except OSError as error:
        raise ServiceError(Reason.STORAGE_FULL, f"{directory}: {error.strerror}") from error


class Executor:
    """Runs operations on an engine and moves the policy's state with them."""

    def __init__(
        self,
        store: PolicyStore,
        catalog: Catalog,
        publisher: Publisher,
        clock: Clock,
        work_dir: Path,
        *,
        keep_checkpoints: int = 0,
        checkpoint_ttl_s: float = 0.0,
    ) -> None:
        """`keep_checkpoints`, `checkpoint_ttl_s`: where a SaveCheckpoint names none; 0: without a limit."""
        self._clock = clock
        self._store = store
        self._catalog = catalog
        self._publisher = publisher
        self._work_dir = work_dir
        self._keep_checkpoints = keep_checkpoints
        self._checkpoint_ttl_s = checkpoint_ttl_s
        self.model_dir = Path()
        """The base model's folder, once it is known."""

    async def run(
        self, engine: Engine, policy: HeldPolicy, logged: pb.LoggedOperation, *, begun: bool
    ) -> operation_pb2.Operation | None:
        """Run an operation to its end, or one slice of it: None if there are more, `begun` from then on.

        ServiceError if it fails; the policy's state in the engine is then unchanged.
        """
        done = operation_pb2.Operation(
            policy=policy.name,
            seq=logged.seq,
            request_id=logged.request_id,
            state=operation_pb2.OPERATION_STATE_DONE,
        )
        match logged.WhichOneof("body"):
            case "forward":
                if not begun:
                    await engine.begin(await self._forward_pass(policy, logged.forward))
                answer = await engine.advance(policy.name)
                if not answer.HasField("forward"):
                    return None
                await self._forward(policy, answer.forward, done)
            case "forward_backward":
                if not begun:
                    await engine.begin(await self._forward_backward_pass(policy, logged.forward_backward))
                answer = await engine.advance(policy.name)
                if not answer.HasField("forward_backward"):
                    return None
                await self._forward_backward(policy, answer.forward_backward, done)
            case "optim_step":
                await self._optim_step(engine, policy, logged.optim_step, done)
            case "save_checkpoint":
                await self._save(engine, policy, logged.save_checkpoint, done)
            case "restore_checkpoint":
                await self._restore(engine, policy, logged.restore_checkpoint, done)
            case "publish_weights":
                await self._publish(engine, policy, done)
            case _:
                raise ServiceError(Reason.INTERNAL, f"operation {logged.seq} has no body")
        return done

    async def replay(
        self,
        engine: Engine,
        policy: HeldPolicy,
        logged: pb.LoggedOperation,
        known: operation_pb2.Operation | None,
        *,
        begun: bool,
    ) -> bool:
        """Bring the engine past an operation that ended before the engine was lost; False while slices of it
        are left.
        """
        kind = logged.WhichOneof("body")
        if known is not None and known.state == operation_pb2.OPERATION_STATE_FAILED:
            return True
        if kind == "publish_weights" and known is not None:
            policy.state = policy.state.published(known.publish_weights.version.version)
            return True
        if kind in ("forward", "save_checkpoint"):
            return True
        return await self.run(engine, policy, logged, begun=begun) is not None

    async def _samples(
        self, policy: HeldPolicy, chunks: Sequence[trainer_service_pb2.SampleChunk]
    ) -> Samples:
        project = policy.record.policy.project
        samples = await patiently(self._clock, lambda: samples_of(self._store, chunks, project))
        policy.pass_tokens = sum(map(_length, samples))
        return samples

    async def _forward_pass(self, policy: HeldPolicy, body: pb.LoggedForward) -> pb.TrainBeginRequest:
        request = pb.TrainForwardRequest(
            policy=policy.name,
            samples=await self._samples(policy, body.chunks),
            return_entropy=body.start.return_entropy,
            use_base_model=body.start.use_base_model,
            return_values=body.start.return_values,
        )
        return pb.TrainBeginRequest(forward=request)

    async def _forward(
        self, policy: HeldPolicy, answer: pb.TrainForwardResponse, done: operation_pb2.Operation
    ) -> None:
        result = done.forward
        result.CopyFrom(answer.result)
        if result.ByteSize() > _INLINE_RESULT_BYTES:
            blob = await self._store.write_blob(result.SerializeToString(), policy.record.policy.project)
            del result.outputs[:]
            result.outputs_blob.CopyFrom(blob)
        done.engine_time.CopyFrom(answer.engine_time)

    async def _forward_backward_pass(
        self, policy: HeldPolicy, body: pb.LoggedForwardBackward
    ) -> pb.TrainBeginRequest:
        request = pb.TrainForwardBackwardRequest(
            policy=policy.name,
            samples=await self._samples(policy, body.chunks),
            losses=body.start.losses,
            return_logprobs=body.start.return_logprobs,
            skip_inert_rows=body.start.skip_inert_rows,
        )
        return pb.TrainBeginRequest(forward_backward=request)

    async def _forward_backward(
        self, policy: HeldPolicy, answer: pb.TrainForwardBackwardResponse, done: operation_pb2.Operation
    ) -> None:
        # From here on the gradient is there: nothing below may fail the operation.
        policy.state = policy.state.with_gradient(done.seq)
        result = done.forward_backward
        result.CopyFrom(answer.result)
        if result.ByteSize() > _INLINE_RESULT_BYTES:
            project = policy.record.policy.project
            blob = await patiently(
                self._clock,
                lambda: self._store.write_blob(result.SerializeToString(), project),
                _FOR_EVER_S,
            )
            del result.outputs[:]
            result.outputs_blob.CopyFrom(blob)
        done.engine_time.CopyFrom(answer.engine_time)

    async def _optim_step(
        self,
        engine: Engine,
        policy: HeldPolicy,
        body: trainer_service_pb2.OptimStepRequest,
        done: operation_pb2.Operation,
    ) -> None:
        policy.state.check_step(body.forward_backward_seqs)
        request = pb.TrainOptimStepRequest(
            policy=policy.name, adamw=body.adamw, denominators=body.denominators
        )
        if body.HasField("clip_norm"):
            request.clip_norm = body.clip_norm
        answer = await engine.optim_step(request)
        policy.state = policy.state.stepped(answer.result.step)
        done.optim_step.CopyFrom(answer.result)
        done.engine_time.CopyFrom(answer.engine_time)

    async def _save(
        self,
        engine: Engine,
        policy: HeldPolicy,
        body: trainer_service_pb2.SaveCheckpointRequest,
        done: operation_pb2.Operation,
    ) -> None:
        with self._scratch() as directory:
            saved = await engine.save(policy.name, directory, adapter_only=False)
            write_state(policy, directory)
            names = (*saved.files, STATE_FILE)
            prefix, manifest = await patiently(
                self._clock, lambda: self._store_checkpoint(policy, directory, names, done.seq)
            )
        checkpoint = policy_pb2.Checkpoint(
            name=prefix,
            policy=policy.name,
            sha256=manifest.sha256,
            manifest_key=f"{prefix}/{MANIFEST}",
            step=policy.state.step,
            version=policy.state.version,
            size_bytes=manifest.size_bytes,
            display_name=body.display_name,
        )
        ttl_s = body.ttl.ToTimedelta().total_seconds() if body.HasField("ttl") else self._checkpoint_ttl_s
        if ttl_s:
            checkpoint.expire_time.FromDatetime(self._clock.now() + timedelta(seconds=ttl_s))
        keep = body.keep_checkpoints or self._keep_checkpoints
        await patiently(
            self._clock, lambda: self._catalog.register_checkpoint(checkpoint, policy.attempt, keep)
        )
        done.save_checkpoint.checkpoint.CopyFrom(checkpoint)
        done.engine_time.FromTimedelta(saved.engine_time)

    async def _store_checkpoint(
        self, policy: HeldPolicy, directory: Path, names: Sequence[str], seq: int
    ) -> tuple[str, Manifest]:
        """Store a checkpoint under a name that follows from the seq, so that a replay finds it."""
        facts = {
            "policy": policy.name,
            "kind": "checkpoint",
            "base_model": policy.record.policy.base_model,
            "base_digest": policy.record.policy.base_digest,
            **tuning_facts(policy.spec),
            "seq": seq,
            "step": policy.state.step,
        }
        number = 0
        while True:
            suffix = f"-{number}" if number else ""
            prefix = f"{policy.name}/checkpoints/c{seq:012d}{suffix}"
            manifest = await self._store.save_set(prefix, directory, names, facts)
            if manifest is not None:
                return prefix, manifest
            log.error("replay diverged", policy=policy.name, checkpoint=prefix)
            number += 1

    async def _restore(
        self,
        engine: Engine,
        policy: HeldPolicy,
        body: trainer_service_pb2.RestoreCheckpointRequest,
        done: operation_pb2.Operation,
    ) -> None:
        step, open_seqs, engine_time = await self.load_checkpoint(
            engine, policy, body.checkpoint, weights_only=body.weights_only
        )
        policy.state = policy.state.restored(step, open_seqs)
        done.restore_checkpoint.checkpoint = body.checkpoint
        done.restore_checkpoint.step = step
        done.engine_time.FromTimedelta(engine_time)

    async def load_checkpoint(
        self,
        engine: Engine,
        policy: HeldPolicy,
        checkpoint: str,
        *,
        weights_only: bool,
        field: str = "checkpoint",
    ) -> tuple[int, tuple[int, ...], timedelta]:
        """Replace the engine's state by a checkpoint's; step, open seqs and time.

        The accumulated gradient of another policy's checkpoint is left out: its seqs mean nothing here.
        """
        owner = checkpoint_policy(checkpoint)
        with self._scratch() as directory, _naming(field):
            manifest = await patiently(self._clock, lambda: self._store.fetch_set(checkpoint, directory))
            if manifest is None:
                raise ServiceError(Reason.CHECKPOINT_NOT_FOUND, f"there is no checkpoint {checkpoint}")
            if manifest.facts.get("base_digest") != policy.record.policy.base_digest:
                text = f"{checkpoint} was made on other base weights ({manifest.facts.get('base_model')})"
                raise ServiceError(Reason.INVALID_WEIGHTS, text)
            drop_gradient = weights_only or owner != policy.name
            restored = await engine.restore(
                policy.name, directory, weights_only=weights_only, drop_gradient=drop_gradient
            )
            state = json.loads((directory / STATE_FILE).read_text())
        open_seqs = () if drop_gradient else tuple(int(seq) for seq in state["open_seqs"])
        return restored.step, open_seqs, restored.engine_time

    async def import_weights(self, engine: Engine, policy: HeldPolicy) -> None:
        """Replace the engine's weights by those that a policy was made from; all of them or none."""
        record = policy.record
        with self._scratch() as directory, _naming("import_files"):
            await patiently(
                self._clock,
                lambda: fetch_import(
                    self._store,
                    record.import_files,
                    record.policy.project,
                    directory,
                    policy.spec,
                    record.policy.base_model,
                    self.model_dir,
                ),
            )
            await engine.restore(policy.name, directory, weights_only=True, drop_gradient=True)

    async def _publish(self, engine: Engine, policy: HeldPolicy, done: operation_pb2.Operation) -> None:
        version, engine_time = await self._publisher.publish(
            engine, policy, done.seq, policy.state.version + 1
        )
        policy.state = policy.state.published(version.version)
        done.publish_weights.version.CopyFrom(version)
        done.engine_time.FromTimedelta(engine_time)

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """An empty folder for as long as it is needed. STORAGE_FULL if it cannot be made."""
        try:
            self._work_dir.mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(dir=self._work_dir, ignore_cleanup_errors=True)
        except OSError as error:
            raise ServiceError(Reason.STORAGE_FULL, f"{self._work_dir}: {error.strerror}") from error
        with folder as path:
            yield Path(path)
