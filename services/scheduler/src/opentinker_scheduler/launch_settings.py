"""What a server that the scheduler starts is told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.settings import SchedulerSettings


def server_settings(
    settings: SchedulerSettings, scheduler_address: str, server: Server, folder: Path
) -> Mapping[str, Any]:
    """What a launched server is told: how to reach everything, what to be. Unset fields are left out."""
    options = server.options
    shared = settings.model_dump(
        mode="json",
        include={
            "listen_host",
            "tls",
            "peer_tls",
            "service_key_file",
            "bootstrap_key_file",
            "nats_url",
            "nats_token_file",
            "s3",
            "scheduler_address_file",
            "lifeline_fd",
            "log_level",
            "traces_endpoint",
            "traces_file",
            "model_roots",
            "model_cache_dir",
            "allow_any_model_dir",
        },
    )
    own: dict[str, Any] = {
        # Of several schedulers the operator names all, so that a server finds the one that leads.
        "scheduler_address": settings.scheduler_address or scheduler_address,
        "state_dir": str(folder),
        "server_id": server.id,
        "slots": server.slots_total,
        "base_model": server.base_model,
        "engine": options.engine,
        "dtype": options.dtype,
        "serving_mode": options.serving_mode,
        "max_lora_rank": options.max_lora_rank,
        "context_tokens": options.context_tokens,
    }
    if settings.service_key_file and settings.bootstrap_key_file:
        own["require_job_tokens"] = True
    if options.ranks > 1:
        own["ranks"] = options.ranks
    extra = settings.server_settings.get(server.role, {})
    merged = {**shared, **own, **extra}
    return {key: value for key, value in merged.items() if value not in (None, "")}
