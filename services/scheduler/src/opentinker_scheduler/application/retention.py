"""How checkpoints end: by request, by count, by age. Records go at once, objects a while later. Versions end
by count, where a trainer asks for it: a run that publishes whole models would fill any disk.

The delay lets who is reading them finish: an export under way, a restore that a trainer runs again. What a
run's loop state names stays whatever its age, and so do what a deployment serves or would go back to and the
newest of a policy. By count, a deletion happens in the transaction that records the newer checkpoint, so
never before that one is complete. Of two checkpoints of a policy the one with the larger id is newer:
trainers number them by operation.
"""

from datetime import datetime, timedelta

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_scheduler.domain.records import Checkpoint, Version
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

MANIFEST = "manifest.json"
_AT_ONCE = 100
"""Checkpoints that one transaction lets go."""
_VERSION_GRACE = timedelta(seconds=60)
"""Versions are large and many, and reading one takes seconds."""


def check_undeployed(tx: Transaction, model: str) -> None:
    """INVALID_STATE where a deployment serves a model, or goes back to it when it is rolled back."""
    deployment = tx.deployments.needing(model)
    if deployment is not None:
        text = f"{deployment} serves {model}, or goes back to it; delete or promote the deployment first"
        raise ServiceError(Reason.INVALID_STATE, text, metadata={"deployment": deployment})


class Retention:
    """Lets checkpoints go."""

    def __init__(self, clock: Clock, *, grace: timedelta) -> None:
        self._clock = clock
        self._grace = grace

    def delete(self, tx: Transaction, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint. INVALID_STATE if a run goes on from it."""
        run = tx.runs.run_from(checkpoint.name)
        if run is not None:
            text = f"{run} goes on from {checkpoint.name}; it can be deleted once the run has a later one"
            raise ServiceError(Reason.INVALID_STATE, text, metadata={"run": run})
        check_undeployed(tx, checkpoint.name)
        self._drop(tx, checkpoint)

    def keep_newest(self, tx: Transaction, policy_id: str, count: int) -> None:
        """Delete all but the newest `count` checkpoints of a policy, and those that runs go on from.

        Newest is what was saved last, not what was recorded last: a restarted trainer records again.
        """
        for old in tx.catalog.older_checkpoints(policy_id, count, _AT_ONCE):
            self._drop_unless_used(tx, old)

    def keep_newest_versions(self, tx: Transaction, policy_id: str, count: int) -> None:
        """Let go of all but the newest `count` versions of a policy, version 0, and what deployments need."""
        for old in tx.catalog.older_versions(policy_id, count, _AT_ONCE):
            if tx.deployments.needing(old.name) is None:
                self.discard_version(tx, old)

    def discard_version(self, tx: Transaction, version: Version) -> None:
        """Delete a version's objects; its number stays taken."""
        tx.catalog.mark_gone(version)
        tx.catalog.discard_objects(version.name, self._clock.now() + min(self._grace, _VERSION_GRACE))

    def expire(self, tx: Transaction) -> None:
        """Delete checkpoints whose time is over."""
        for old in tx.catalog.expired_checkpoints(self._clock.now(), _AT_ONCE):
            self._drop_unless_used(tx, old)

    async def sweep(self, database: Database, store: ObjectStore) -> None:
        """Delete objects that are due, manifests first: what is left over then does not exist."""
        now: datetime = self._clock.now()
        await database.run(self.expire)
        for prefix in await database.run(lambda tx: tx.catalog.discarded_objects(now, _AT_ONCE)):
            await store.delete(f"{prefix}/{MANIFEST}")
            objects = await store.list(f"{prefix}/")
            for info in objects:
                await store.delete(info.key)
            await database.run(lambda tx, gone=prefix: tx.catalog.forget_objects(gone))  # type: ignore[misc]
            log.info("deleted", prefix=prefix, objects=len(objects))

    def _drop_unless_used(self, tx: Transaction, checkpoint: Checkpoint) -> None:
        used = tx.runs.run_from(checkpoint.name) or tx.deployments.needing(checkpoint.name)
        if used is None:
            self._drop(tx, checkpoint)

    def _drop(self, tx: Transaction, checkpoint: Checkpoint) -> None:
        tx.catalog.delete_checkpoint(checkpoint.policy_id, checkpoint.id)
        tx.catalog.discard_objects(checkpoint.name, self._clock.now() + self._grace)
