"""What a scheduler shows to Prometheus."""

import asyncio
from typing import Any

import pytest
from services.scheduler.tests.conftest import MODEL

from opentinker_kit.testing import wait_until
from opentinker_kit.testing.metrics import Page, scrape
from opentinker_scheduler.adapters.metrics import waits_for
from opentinkerapi.scheduler.v1 import job_pb2


async def read(rig: Any) -> Page:
    return await asyncio.to_thread(scrape, rig.scheduler.server.metrics_port)


async def test_queue_jobs_servers_grants_and_ticks(start_rig: Any) -> None:
    rig = await start_rig(max_servers=1, trainer_slots=1, metrics_port=0)
    job = await rig.create_job()
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    other = await rig.create_job()

    async def settled() -> bool:
        return "1 trainer slot" in (await rig.job(other.name)).state_reason

    await wait_until(settled, 10)

    def seen() -> bool:
        return bool(rig.scheduler.reconciler.watcher.__self__._queue.get(("trainer_slots", "default")))

    await wait_until(seen, 10)
    page = await read(rig)
    assert page.value("opentinker_scheduler_jobs", state="running", project="default") == 1
    assert page.value("opentinker_scheduler_jobs", state="queued", project="default") == 1
    assert page.value("opentinker_scheduler_queue", reason="trainer_slots", project="default") == 1
    assert page.value("opentinker_scheduler_servers", state="ready", role="trainer") == 1
    assert page.value("opentinker_scheduler_slots", role="trainer", kind="used") == 1
    assert page.value("opentinker_scheduler_slots", role="trainer", kind="all") == 1
    assert page.value("opentinker_scheduler_grants_total", project="default") == 1
    assert page.value("opentinker_scheduler_tick_seconds_count") >= 2
    created = {"method": "scheduler.v1.SchedulerService/CreateJob", "reason": "OK"}
    assert page.value("opentinker_rpc_seconds_count", **created) == 2


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("waiting for its quota: project default used 3 of max_slots=3", "quota"),
        ("waiting for its client: the scheduler restarted, and nobody asked for this job since", "client"),
        ("waiting to be placed: the scheduler places at most its limit of jobs a tick", "tick_limit"),
        (f"waiting for 2 trainer slots of {MODEL}: all are in use; 12 jobs ahead", "trainer_slots"),
        (f"waiting for 1 inference slot of {MODEL} on vllm: all are in use", "inference_slots"),
        ("queued", "not_looked_at_yet"),
        ("something new", "other"),
    ],
)
def test_what_a_job_waits_for_is_one_of_a_few_words(text: str, word: str) -> None:
    class Queued:
        state_reason = text

    assert waits_for(Queued()) == word  # type: ignore[arg-type]
