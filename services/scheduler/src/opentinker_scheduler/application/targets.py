"""What names of models stand for: versions, checkpoints and base models."""

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.catalog import Catalog
from opentinker_scheduler.domain.deployments import BASE
from opentinker_scheduler.domain.names import split
from opentinker_scheduler.domain.records import Target
from opentinker_scheduler.ports import ModelSource, Transaction
from opentinkerapi.runtime.reasons import Reason


class Targets:
    """Finds weights by name."""

    def __init__(self, catalog: Catalog, models: ModelSource) -> None:
        self._catalog = catalog
        self._models = models

    def find(self, tx: Transaction, name: str, field: str, project: str) -> Target:
        """The weights of a name in a project; of a policy its newest version. A base model is taken by its
        word.

        POLICY_NOT_FOUND, VERSION_NOT_FOUND, CHECKPOINT_NOT_FOUND; INVALID_FIELD where it is no such name.
        """
        if name.startswith(BASE) and len(name) > len(BASE):
            return Target(name, name.removeprefix(BASE))
        if not name.startswith("policies/"):
            text = (
                f"{name!r} names no weights; they look like policies/P, policies/P/versions/N, "
                f"policies/P/checkpoints/C or {BASE}BASE"
            )
            raise ServiceError(Reason.INVALID_FIELD, text, field=field)
        if split(name, "policies", "checkpoints") is not None:
            policy_id = self._catalog.checkpoint(tx, name, project).policy_id
            policy = self._catalog.policy(tx, f"policies/{policy_id}")
            return Target(name, policy.base_model, policy)
        if name.count("/") > 1:
            version = self._catalog.version(tx, name, project)
        else:
            policy = self._catalog.policy(tx, name, project)
            version = self._catalog.version(tx, f"{name}/versions/{policy.latest_version}")
        policy = self._catalog.policy(tx, f"policies/{version.policy_id}")
        return Target(version.name, policy.base_model, policy, version.version)

    async def check_base(self, target: Target, field: str) -> Target:
        """A base model under the id that the cluster has it under. UNKNOWN_MODEL, listing what is known."""
        if target.policy is not None:
            return target
        model = await self._models.resolve(target.base_model, field)
        return Target(f"{BASE}{model.model_id}", model.model_id)
