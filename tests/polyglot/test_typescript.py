"""A TypeScript client, generated from the protos, trains a step and samples the result."""

import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

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
