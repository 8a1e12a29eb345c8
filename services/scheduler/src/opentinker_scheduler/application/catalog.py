"""The catalog: what trainers made, recorded under the attempt that made it."""

from dataclasses import replace

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import check_attempt, job_of, note_progress
from opentinker_scheduler.application.retention import Retention, check_undeployed
from opentinker_scheduler.domain.names import MAX_NAME, SHA256, check_text, require, split, valid_id
from opentinker_scheduler.domain.records import Checkpoint, Fact, Policy, Version
from opentinker_scheduler.ports import Transaction
from opentinkerapi.runtime.reasons import Reason


class Catalog:
    """Policies, versions and checkpoints. Every method is called inside a transaction."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self._clock = clock
        self._retention = retention

    def register_policy(
        self, tx: Transaction, policy: Policy, sha256: str, manifest_key: str, attempt: int
    ) -> Policy:
        """Record a policy and its version 0. The same policy again is the same answer."""
        if not valid_id(policy.id):
            raise ServiceError(
                Reason.INVALID_FIELD, f"{policy.name!r} is no policy name", field="policy.name"
            )
        _check_digest(sha256, "version_sha256")
        check_text(policy.display_name, MAX_NAME, "policy.display_name")
        if policy.job_id:
            policy = replace(policy, project=job_of(tx, f"jobs/{policy.job_id}").project)
            check_attempt(tx, policy.job_id, attempt)
        now = self._clock.now()
        policy = replace(policy, create_time=now)
        known = tx.catalog.find_policy(policy.id)
        version = Version(policy.id, 0, sha256, manifest_key, step=0, create_time=now)
        if known is not None:
            first = tx.catalog.find_version(policy.id, 0)
            same = replace(
                known, create_time=now, seq=0, latest_version=0, base_digest=policy.base_digest
            ) == replace(policy, latest_version=0)
            if not same or first is None or first.sha256 != sha256:
                raise _taken(policy.name)
            return known
        policy = tx.catalog.add_policy(policy)
        tx.catalog.add_version(version)
        self._announce(tx, version)
        return policy

    def policy(self, tx: Transaction, name: str, scope: str | None = None) -> Policy:
        """POLICY_NOT_FOUND, also for one outside the project that is looked at (None: all)."""
        (policy_id,) = require(name, Reason.POLICY_NOT_FOUND, "policy", "policies")
        policy = tx.catalog.find_policy(policy_id)
        if policy is None or scope not in (None, policy.project):
            raise ServiceError(Reason.POLICY_NOT_FOUND, f"there is no policy {name}", field="name")
        return policy

    def delete_policy(self, tx: Transaction, name: str, scope: str | None) -> None:
        """Forget a policy. INVALID_STATE while a job that runs may still train it."""
        policy = self.policy(tx, name, scope)
        job = tx.jobs.find(policy.job_id) if policy.job_id else None
        if job is not None and not job.state.final:
            text = (
                f"{name} belongs to {job.name}, which is {job.state.upper()}; finish or cancel the job first"
            )
            raise ServiceError(Reason.INVALID_STATE, text, metadata={"job": job.name})
        check_undeployed(tx, policy.name)
        tx.catalog.delete_policy(policy.id)

    def register_version(
        self, tx: Transaction, name: str, version: Version, attempt: int, keep: int = 0
    ) -> Version:
        """Record a published version, and let go of what is older than the newest `keep` (0: of nothing).

        Another content under its number is ALREADY_REGISTERED.
        """
        policy = self.policy(tx, name)
        if keep < 0:
            text = "keep_versions must not be negative"
            raise ServiceError(Reason.INVALID_FIELD, text, field="keep_versions")
        if version.version < 0:
            raise ServiceError(Reason.INVALID_FIELD, "version must not be negative", field="version.version")
        _check_digest(version.sha256, "version.sha256")
        self._check_holder(tx, policy, attempt)
        version = replace(version, policy_id=policy.id, create_time=self._clock.now())
        known = tx.catalog.find_version(policy.id, version.version)
        if known is not None:
            if known.sha256 != version.sha256:
                raise _taken(version.name)
            if known.gone:
                # A restarted trainer ran its log again and stored it anew.
                self._retention.discard_version(tx, known)
            return known
        tx.catalog.add_version(version)
        if keep:
            self._retention.keep_newest_versions(tx, policy.id, keep)
        self._announce(tx, version)
        note_progress(tx, policy.job_id, self._clock.now())
        return version

    def version(self, tx: Transaction, name: str, scope: str | None = None) -> Version:
        """VERSION_NOT_FOUND, also for those of policies outside the project that is looked at."""
        ids = split(name, "policies", "versions")
        if ids is not None and ids[1].isdecimal() and _visible(tx, ids[0], scope):
            found = tx.catalog.find_version(ids[0], int(ids[1]))
            if found is not None and found.gone:
                text = f"the weights of {name} were deleted: newer versions of the policy took their place"
                raise ServiceError(Reason.VERSION_NOT_FOUND, text, field="name")
            if found is not None:
                return found
        raise ServiceError(Reason.VERSION_NOT_FOUND, f"there is no version {name}", field="name")

    def register_checkpoint(
        self, tx: Transaction, name: str, checkpoint: Checkpoint, attempt: int, keep: int = 0
    ) -> Checkpoint:
        """Record a saved checkpoint, and let go of what is older than the newest `keep` (0: of nothing).

        Another content under its name is ALREADY_REGISTERED.
        """
        policy = self.policy(tx, name)
        if keep < 0:
            text = "keep_checkpoints must not be negative"
            raise ServiceError(Reason.INVALID_FIELD, text, field="keep_checkpoints")
        if not valid_id(checkpoint.id):
            text = f"{checkpoint.id!r} is no checkpoint id"
            raise ServiceError(Reason.INVALID_FIELD, text, field="checkpoint.name")
        _check_digest(checkpoint.sha256, "checkpoint.sha256")
        check_text(checkpoint.display_name, MAX_NAME, "checkpoint.display_name")
        self._check_holder(tx, policy, attempt)
        now = self._clock.now()
        checkpoint = replace(checkpoint, policy_id=policy.id, create_time=now)
        known = tx.catalog.find_checkpoint(policy.id, checkpoint.id)
        if known is not None:
            if known.sha256 != checkpoint.sha256:
                raise _taken(checkpoint.name)
            return known
        if tx.catalog.is_discarded(checkpoint.name):
            # A restarted trainer runs its log again; what was deleted meanwhile stays deleted.
            return checkpoint
        checkpoint = tx.catalog.add_checkpoint(checkpoint)
        tx.outbox.add(
            Fact("checkpoint_saved", checkpoint.name, id=f"checkpoint.saved/{checkpoint.name}"), now
        )
        if keep:
            self._retention.keep_newest(tx, policy.id, keep)
        note_progress(tx, policy.job_id, self._clock.now())
        return checkpoint

    def checkpoint(self, tx: Transaction, name: str, scope: str | None = None) -> Checkpoint:
        """CHECKPOINT_NOT_FOUND, also for those of policies outside the project that is looked at."""
        ids = require(name, Reason.CHECKPOINT_NOT_FOUND, "checkpoint", "policies", "checkpoints")
        found = tx.catalog.find_checkpoint(*ids)
        if found is None or not _visible(tx, ids[0], scope):
            raise ServiceError(Reason.CHECKPOINT_NOT_FOUND, f"there is no checkpoint {name}", field="name")
        return found

    def delete_checkpoint(self, tx: Transaction, name: str, scope: str | None) -> None:
        """CHECKPOINT_NOT_FOUND, or INVALID_STATE where a run goes on from it."""
        self._retention.delete(tx, self.checkpoint(tx, name, scope))

    def _check_holder(self, tx: Transaction, policy: Policy, attempt: int) -> None:
        if policy.job_id:
            check_attempt(tx, policy.job_id, attempt)

    def _announce(self, tx: Transaction, version: Version) -> None:
        detail: dict[str, str | int] = {
            "version": version.version,
            "sha256": version.sha256,
            "manifest_key": version.manifest_key,
        }
        fact = Fact(
            "weights_published",
            f"policies/{version.policy_id}",
            id=f"weights.published/{version.name}",
            detail=detail,
        )
        tx.outbox.add(fact, version.create_time)


def _visible(tx: Transaction, policy_id: str, scope: str | None) -> bool:
    """Whether a policy belongs to the project that is looked at."""
    if scope is None:
        return True
    policy = tx.catalog.find_policy(policy_id)
    return policy is not None and policy.project == scope


def _check_digest(sha256: str, field: str) -> None:
    if SHA256.fullmatch(sha256) is None:
        text = f"{sha256!r} is no lower-case hex SHA-256"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)


def _taken(name: str) -> ServiceError:
    text = f"{name} is registered with another content"
    return ServiceError(Reason.ALREADY_REGISTERED, text, metadata={"name": name})
