"""Health and GetCapabilities answer within a second while vLLM is full: SmolLM2-135M, 256 callers at once.

The server is a process of its own, as a launcher starts it. The callers ask for 64 tokens again as soon as
they are answered; for two minutes each question is asked five times a second, from another process.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.sample_ours import Client
from benchmarks.sample_work import MODEL, Work
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import open_channel
from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "opentinkerapi.inference.v1.InferenceService"
CALLERS, NEW_TOKENS = 256, 64
SECONDS, EVERY_S, WITHIN_S = 120.0, 0.2, 1.0


def ask(address: str) -> dict[str, Any]:
    """How long answers took. In a process of its own: what else runs there would count as the server's."""
    waited: dict[str, list[float]] = {"health": [], "capabilities": []}
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        make: Any = InferenceServiceStub  # its types are those of asyncio's channels
        stub = make(channel)
        questions = (
            ("health", health.Check, health_pb2.HealthCheckRequest(service=SERVICE)),
            ("capabilities", stub.GetCapabilities, pb.GetCapabilitiesRequest()),
        )
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends:
            for name, method, request in questions:
                begin = time.perf_counter()
                method(request, timeout=60)
                waited[name].append(time.perf_counter() - begin)
            time.sleep(EVERY_S)
    return {
        name: {
            "asked": len(times),
            "later_than_1_s": sum(each > WITHIN_S for each in times),
            "p50_s": round(float(np.percentile(times, 50)), 4),
            "p99_s": round(float(np.percentile(times, 99)), 4),
            "max_s": round(max(times), 4),
        }
        for name, times in waited.items()
    }


async def saturate(folder: Path) -> dict[str, Any]:
    """Fill a server, and have it asked."""
    ready, settings = folder / "ready.json", folder / "settings.json"
    settings.touch(0o600)
    settings.write_text(
        json.dumps(
            {"base_model": MODEL, "state_dir": str(folder / "state"), "ready_file": str(ready)}
            | {"engine": "vllm", "dtype": "bfloat16", "context_tokens": 1024}
        )
    )
    command = (sys.executable, "-m", "opentinker_inference", "--settings", str(settings))
    server = await asyncio.create_subprocess_exec(*command, stdin=subprocess.DEVNULL)
    try:
        await wait_until(ready.exists, 120, what="the server listens")
        address = str(json.loads(ready.read_text())["address"])
        async with open_channel(address) as channel:
            stub, health = InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)

            async def is_up() -> bool:
                answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            await wait_until(is_up, 600, what="the engine runs")
            return await _asked_beside(Client(stub), address)
    finally:
        server.terminate()
        await server.wait()


async def _asked_beside(client: Client, address: str) -> dict[str, Any]:
    answered = 0

    async def call(caller: int) -> None:
        nonlocal answered
        number = 0
        while True:
            number += 1
            await client.run(Work(number * CALLERS + caller, 1, 1, 35, NEW_TOKENS))
            answered += 1

    callers = [asyncio.create_task(call(number)) for number in range(CALLERS)]
    try:
        await wait_until(lambda: answered >= CALLERS, 300, what="every caller was answered")
        before, begin = answered, time.perf_counter()
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scripts.evidence_cases.saturated", address),
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        output, _ = await asking.communicate()
        if asking.returncode:
            raise RuntimeError(f"the process that asks ended with {asking.returncode}")
        found: dict[str, Any] = json.loads(output)
        seconds = time.perf_counter() - begin
        for ended in [caller for caller in callers if caller.done()]:
            ended.result()
        return found | {"tokens_per_s_meanwhile": round((answered - before) * NEW_TOKENS / seconds)}
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


def run(progress: Progress) -> dict[str, object]:
    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="ot-saturated-") as folder:
            return asyncio.run(saturate(Path(folder)))

    found = progress.part("all", measure)
    late = {name: found[name]["later_than_1_s"] for name in ("health", "capabilities")}
    return {"callers": CALLERS, "new_tokens": NEW_TOKENS, **found, "held": not any(late.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ask a server how it is, for a while.")
    parser.add_argument("address")
    print(json.dumps(ask(parser.parse_args().address)))
