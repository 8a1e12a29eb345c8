"""A built wheel holds what an editable installation shows."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.contract.protofiles import PROTOS


def test_the_api_wheel_joins_generated_code_and_runtime(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path, PROTOS], check=True, timeout=100)
    (wheel,) = tmp_path.glob("opentinker_api-*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    present = {path.relative_to(unpacked).as_posix() for path in (unpacked / "opentinkerapi").rglob("*.py*")}
    expected = {
        path.relative_to(root).as_posix()
        for root in (PROTOS / "gen", PROTOS / "src")
        for path in root.rglob("*.py*")
        if path.suffix != ".pyc" and path.is_file()
    }
    assert present == expected
    assert "opentinkerapi/__init__.py" not in present, "a namespace package has no __init__"
    program = (
        "import opentinkerapi.runtime.errors, opentinkerapi.trainer.v1.trainer_service_pb2_grpc as stubs;"
        "print(stubs.__file__)"
    )
    environment = {"PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.startswith(str(unpacked))
