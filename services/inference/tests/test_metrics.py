"""What an inference server shows to Prometheus."""

import asyncio
from pathlib import Path

from services.inference.tests.serving import serving

from opentinker_kit.testing.metrics import scrape


async def test_tokens_and_requests(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, engine="noop", metrics_port=0) as client:
        request = client.request("one", n=2, max_tokens=4)
        sampled = sum(len(each.token_ids) // 4 for each in (await client.send(request)).completions.values())
        # Asked for again it is answered from memory, which is no sampling.
        await client.send(request)
        await client.failure(client.request("two", b"x" * 100_000))
        page = await asyncio.to_thread(scrape, client.server.server.metrics_port)
    assert sampled > 0
    assert page.value("opentinker_inference_tokens_total", kind="sampled") == sampled
    assert page.value("opentinker_inference_tokens_total", kind="prompt") == len(b"2 + 2 = ")
    assert page.value("opentinker_inference_requests_ended_total", reason="OK") == 1
    assert page.value("opentinker_inference_requests", state="running") == 0
    method = "inference.v1.InferenceService/Sample"
    assert page.value("opentinker_rpc_seconds_count", method=method, reason="OK") == 2
    assert page.value("opentinker_rpc_seconds_count", method=method, reason="PROMPT_TOO_LONG") == 1
