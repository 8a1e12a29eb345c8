"""TypeScript clients, generated from the protos: one trains a step and samples, one plays episodes."""

import asyncio
import json
import math
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import opentinker as ot
from opentinker.environments import Action, environment_source
from opentinker.environments.builtin import GuessNumber
from opentinker_local import attach
from tests.contract.test_environment_session import running_host

FOLDER = Path(__file__).resolve().parent / "typescript"
PROTOS = Path(__file__).resolve().parents[2] / "protos"
# 64-bit integers as strings: a JavaScript number holds 53 bits.
OPTIONS = ",".join(
    (
        "outputServices=grpc-js",
        "env=node",
        "esModuleInterop=true",
        "forceLong=string",
        "importSuffix=.js",
        "oneof=unions-value",
    )
)


@pytest.fixture(scope="session")
def compiled() -> Path:
    """The client's entry point, generated and compiled."""
    plugin = FOLDER / "node_modules" / ".bin" / "protoc-gen-ts_proto"
    assert shutil.which("node"), "node not found; on Debian: apt-get install nodejs npm"
    assert plugin.exists(), (
        f"its packages are not installed: npm ci --prefix {FOLDER.relative_to(PROTOS.parent)}"
    )
    generated = FOLDER / "gen"
    shutil.rmtree(generated, ignore_errors=True)
    generated.mkdir()
    roots = (PROTOS, PROTOS / "third_party", files("grpc_tools") / "_proto")
    run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            *(f"--proto_path={root}" for root in roots),
            f"--plugin=protoc-gen-ts_proto={plugin}",
            f"--ts_proto_out={generated}",
            f"--ts_proto_opt={OPTIONS}",
            "google/rpc/error_details.proto",
            *sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "opentinkerapi").rglob("*.proto")),
        ],
        timeout=60,
    )
    shutil.rmtree(FOLDER / "build", ignore_errors=True)
    run([str(FOLDER / "node_modules" / ".bin" / "tsc"), "--project", str(FOLDER)], timeout=120)
    return FOLDER / "build" / "src" / "main.js"


def run(command: list[str], timeout: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_generated_client_compiles(compiled: Path) -> None:
    assert compiled.exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_trains_a_step_and_samples_the_result(
    compiled: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    with ot.connect(state_dir=tmp_path / "stack") as cluster:
        key_file = attach(tmp_path / "stack").bootstrap_key_file
        words = ["--address", cluster.address, "--key-file", str(key_file), "--model", str(tiny_model_dir)]
        found = json.loads(run(["node", str(compiled), *words], timeout=240))
    assert found["states"][-1] == "JOB_STATE_RUNNING"
    assert found["outcome"] == "JOB_STATE_SUCCEEDED"
    assert found["step"] == "1"
    assert found["version"] == "1"
    # The trainer's loss and the sampler's scores of version 0 are one number, computed by two services.
    assert found["lossSum"] == pytest.approx(-found["logprobBefore"], abs=1e-3)
    # One step down the gradient makes the text likelier in the version that was published.
    assert found["logprobAfter"] > found["logprobBefore"]
    assert len(found["completions"]) == 2
    for completion in found["completions"]:
        assert len(completion["tokens"]) == len(completion["logprobs"]) == 6
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in completion["logprobs"])
        assert completion["versions"] == ["1"]


async def played_here(seed: int, options: dict[str, int], guesses: list[str]) -> dict[str, object]:
    """The same episode of the same class in this process, as the program tells it."""
    source = await environment_source(GuessNumber, options)
    (session,) = await source.open_group(task={}, seed=seed, size=1)
    seen: list[dict[str, object]] = [{"texts": [(await session.begin()).text], "rewards": []}]
    for seq, guess in enumerate(guesses, start=1):
        result = await session.step(Action(guess), seq)
        reward = {"value": result.reward.value, "status": f"REWARD_STATUS_{result.reward.status}"}
        seen.append({"texts": [result.observation.text] if result.observation else [], "rewards": [reward]})
        if result.done:
            break
    end = await session.finalize()
    reward = {"value": end.reward.value, "status": f"REWARD_STATUS_{end.reward.status}"}
    return {"seen": seen, "rewards": [reward], "endReason": f"END_REASON_{end.end_reason}"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_plays_episodes_as_python_does(compiled: Path, tmp_path: Path) -> None:
    """The environment's class is the same; so is what is seen and what it is worth, by whichever call."""
    won, lost = ["50", "25", "12", "6", "3", "2", "1"], ["no idea", "51"] * 4
    with running_host(tmp_path / "host") as port:
        for seed, guesses in ((3, won), (2**64 - 1, lost)):
            words = ["--address", f"127.0.0.1:{port}", "--environment", "guess_number", "--seed", str(seed)]
            words += ["--options", '{"high": 50}', "--actions", json.dumps(guesses)]
            found = json.loads(run(["node", str(compiled.parent / "episodes.js"), *words], timeout=60))
            expected = asyncio.run(played_here(seed, {"high": 50}, guesses))
            assert found["unary"] == found["drive"] == found["again"] == expected
            assert found["unary"]["rewards"][0]["value"] is not None
            errors = found["errors"]
            assert errors["unary"] == errors["drive"]
            assert errors["unary"]["reason"] == "STEP_OUT_OF_ORDER"
            assert int(errors["unary"]["metadata"]["next_seq"]) == len(expected["seen"])  # type: ignore[arg-type]
            assert (errors["unknown"]["code"], errors["unknown"]["reason"]) == (3, "UNKNOWN_ENVIRONMENT")
