"""A TypeScript client, generated from the protos, trains a step and samples the result."""

import json
import math
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import opentinker as ot
from opentinker_local import attach

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
