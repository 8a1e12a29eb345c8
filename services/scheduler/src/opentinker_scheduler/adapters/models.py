"""Base models by name: those on this machine's disk, or those of servers that are there."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from opentinker_kit.errors import ServiceError
from opentinker_kit.models import image_settings, known_models, locate_model
from opentinker_scheduler.domain.admission import Model
from opentinker_scheduler.ports import Database
from opentinkerapi.runtime.reasons import Reason


class DiskModels:
    """See `ports.ModelSource`. Looks without reading weights, so that a job is admitted at once."""

    def __init__(self, model_roots: Sequence[Path], cache_dir: Path | None, allow_any_dir: bool) -> None:
        self._model_roots = tuple(model_roots)
        self._cache_dir = cache_dir
        self._allow_any_dir = allow_any_dir

    async def resolve(self, model_id: str, field: str) -> Model:
        def look() -> Model:
            found = locate_model(
                model_id,
                model_roots=self._model_roots,
                cache_dir=self._cache_dir,
                allow_any_dir=self._allow_any_dir,
                field=field,
            )
            images = found.path is not None and image_settings(found.path) is not None
            return Model(found.model_id, found.context_length, images)

        return await asyncio.to_thread(look)

    async def known(self) -> Sequence[str]:
        return await asyncio.to_thread(known_models, self._model_roots)


class ServedModels:
    """Where servers register themselves, the models are theirs; before the first any name may come."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def resolve(self, model_id: str, field: str) -> Model:
        known = await self.known()
        if known and model_id not in known:
            text = f"model {model_id!r} is on no server of this cluster; they serve: {', '.join(known)}"
            raise ServiceError(Reason.UNKNOWN_MODEL, text, field=field)
        return Model(model_id, 0)

    async def known(self) -> Sequence[str]:
        servers = await self._database.run(lambda tx: tx.servers.live())
        return sorted({server.base_model for server in servers})
