"""OpenAI's own client for Node against the gateway: the script is `typescript/src/openai.ts`."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from services.gateway.tests.doubles import KEY, Inference, Scheduler, serve_doubles
from services.gateway.tests.tokenizers import TAGGED, files

from opentinker_gateway.bootstrap import build
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.files import write_atomic

FOLDER = Path(__file__).resolve().parent / "typescript"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_conversation_with_tools_in_node(tmp_path: Path) -> None:
    assert shutil.which("node"), "node not found; on Debian: apt-get install nodejs npm"
    assert (FOLDER / "node_modules" / "openai").exists(), "npm ci --prefix tests/polyglot/typescript"
    program = await _compiled(tmp_path)
    for name, secret in (("bootstrap", KEY), ("service", "service-key")):
        write_atomic(tmp_path / f"{name}.key", secret, mode=0o600)
    inference = Inference(files(TAGGED), script=[CALL, "It is 2 🙂."])
    server, address = await serve_doubles(Scheduler(), inference)
    gateway = build(
        GatewaySettings(
            scheduler_address=address,
            bootstrap_key_file=tmp_path / "bootstrap.key",
            service_key_file=tmp_path / "service.key",
            state_dir=tmp_path,
            drain_s=1.0,
        )
    )
    port = await gateway.start()
    try:
        words = ["--url", f"http://127.0.0.1:{port}/v1", "--key-file", str(tmp_path / "bootstrap.key")]
        found = json.loads(await _run("node", str(program), *words, "--model", "mine"))
    finally:
        gateway.server.request_drain()
        await gateway.server.wait()
        await gateway.stop()
        await server.stop(grace=0)
    assert found["models"] == ["mine", "tiny", "policies/p"]
    assert found["finishFirst"] == "tool_calls"
    assert json.loads(found["arguments"]) == {"a": 1}
    assert found["text"] == "It is 2 🙂."
    assert found["finish"] == "stop"
    assert found["tokens"] == len("It is 2 🙂.".encode()) + 1
    assert found["errors"] == [
        "401 invalid_api_key null",
        "404 model_not_found model",
        "400 unsupported_option verbosity",
    ]
    assert "the tool says 2" in inference.prompt_text()


async def _compiled(folder: Path) -> Path:
    """The script as JavaScript, beside the packages that it imports."""
    out = FOLDER / "build" / "openai"
    compiler = FOLDER / "node_modules" / ".bin" / "tsc"
    options = ["--target", "es2022", "--module", "nodenext", "--moduleResolution", "nodenext", "--strict"]
    options += ["--skipLibCheck", "--types", "node", "--outDir", str(out)]
    await _run(str(compiler), *options, str(FOLDER / "src" / "openai.ts"))
    return out / "openai.js"


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=FOLDER,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-3000:]
    return out.decode()
