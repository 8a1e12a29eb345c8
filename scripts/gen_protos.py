"""Generate the Python code of the protos into protos/gen.

Usage: python scripts/gen_protos.py [--check]

File path = proto package = import path, so nothing that protoc writes is edited afterwards. The google.*
modules come from the googleapis-common-protos and protobuf wheels and are not generated. With --check nothing
is written: the exit status is 1 if protos/gen differs from what the protos say.
"""

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"
PACKAGE = "opentinkerapi"
GENERATED = PROTOS / "gen"


def generate(out: Path) -> None:
    """Run protoc and the typing plugins over every proto file, into the empty folder `out`."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in (PROTOS / PACKAGE).rglob("*.proto"))
    if not sources:
        raise SystemExit(f"no .proto file below {PROTOS / PACKAGE}")
    # The typing plugins are console scripts of the environment that runs this script.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={PROTOS / 'third_party'}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out=quiet,only_async:{out}",
            *sources,
        ]
    )
    if status:
        raise SystemExit(status)
    drop_empty_service_modules(out)
    (out / PACKAGE / "py.typed").touch()


def drop_empty_service_modules(out: Path) -> None:
    """protoc writes a *_pb2_grpc module for each file, though most files have no service."""
    for module in out.rglob("*_pb2_grpc.py"):
        if "Servicer" not in module.read_text():
            module.unlink()
            module.with_suffix(".pyi").unlink(missing_ok=True)


def relative_files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def differences(fresh: Path, committed: Path) -> list[str]:
    """One line for each generated file that is missing, stale or different."""
    wanted, present = relative_files(fresh), relative_files(committed)
    lines = [f"missing: {name}" for name in wanted - present]
    lines += [f"stale: {name}" for name in present - wanted]
    lines += [
        f"differs: {name}"
        for name in wanted & present
        if not filecmp.cmp(fresh / name, committed / name, shallow=False)
    ]
    return sorted(lines)


def install(fresh: Path, committed: Path) -> None:
    """Make `committed` equal to `fresh`, touching only the files that differ."""
    for name in relative_files(committed) - relative_files(fresh):
        (committed / name).unlink()
    for name in relative_files(fresh):
        target = committed / name
        if not target.exists() or not filecmp.cmp(fresh / name, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fresh / name, target)
    for folder in sorted((path for path in committed.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if protos/gen is not fresh")
    check: bool = parser.parse_args(argv).check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        changed = differences(fresh, GENERATED)
        if check and changed:
            print("generated code is not fresh (run `make proto`):", *changed, sep="\n  ")
            return 1
        if not check:
            install(fresh, GENERATED)
    print(f"protos/gen: {'fresh' if not changed else f'{len(changed)} file(s) written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
