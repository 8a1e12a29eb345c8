"""What a trainer shows to Prometheus."""

import asyncio
from pathlib import Path

from services.trainer.tests.builders import sample
from services.trainer.tests.server.harness import Client

from opentinker_kit.events import NullEventBus
from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.testing import wait_until
from opentinker_kit.testing.metrics import scrape
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.runtime.channels import open_channel


async def test_operations_and_tokens(tmp_path: Path) -> None:
    settings = TrainerSettings(base_model="tiny", engine="noop", state_dir=tmp_path, metrics_port=0)
    server = TrainerServer(settings, objects=MemoryObjectStore(), bus=NullEventBus())
    await server.start()
    await wait_until(lambda: server.admission.limits is not None, 30)
    async with open_channel(server.server.address) as channel:
        client = Client(channel)
        await client.create()
        operation = await client.forward_backward([sample(5, 3, 1), sample(6, 3, 2)])
        trained = (await client.done(operation)).forward_backward.trained_tokens
        await client.done(await client.step([operation.seq]))
        page = await asyncio.to_thread(scrape, server.server.metrics_port)
    assert trained > 0
    assert page.value("opentinker_trainer_tokens_trained_total") == trained
    for kind in ("forward_backward", "optim_step"):
        assert page.value("opentinker_trainer_operation_seconds_count", kind=kind, state="done") == 1
    assert page.value("opentinker_trainer_operations", state="running") == 0
    assert page.value("opentinker_trainer_operations", state="waiting") == 0
    assert page.value("opentinker_trainer_policies") == 1
    method = "trainer.v1.TrainerService/OptimStep"
    assert page.value("opentinker_rpc_seconds_count", method=method, reason="OK") == 1
    await server.server.drain()
    await server.run()
