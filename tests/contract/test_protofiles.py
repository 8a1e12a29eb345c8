"""What every proto file has from the first commit on, since adding it later would break callers."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.api import field_behavior_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from tests.contract import protofiles
from tests.contract.protofiles import ROOT, Method

FILES = protofiles.proto_files()
METHODS = protofiles.methods()
BUF = Path(sys.executable).parent / "buf"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_each_file_has_its_options_for_other_languages(file: FileDescriptorProto) -> None:
    package = file.package.split(".")
    assert Path(file.name).parts[:-1] == tuple(package), "file path and proto package differ"
    assert file.syntax == "proto3"
    assert file.options.go_package.endswith(f"{package[-2]}/{package[-1]};{package[-2]}{package[-1]}")
    assert file.options.java_package.endswith(".".join(package[1:]))
    assert file.options.java_multiple_files


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.name))
def test_a_proto_file_is_one_resource_or_one_service(file: FileDescriptorProto) -> None:
    assert len(file.service) <= 1
    assert len((protofiles.PROTOS / file.name).read_text().splitlines()) <= 400


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.name))
def test_each_request_field_says_whether_it_is_required(method: Method) -> None:
    silent = [
        name for name, field in protofiles.request_fields(method) if not protofiles.says_behavior(field)
    ]
    assert not silent, f"no google.api.field_behavior on {silent}"


def test_time_is_never_a_float() -> None:
    floats = {FieldDescriptorProto.TYPE_DOUBLE, FieldDescriptorProto.TYPE_FLOAT}
    suspicious = [
        f"{name[1:]}.{field.name}"
        for name, message in protofiles.messages().items()
        for field in message.field
        if field.type in floats and field.name.endswith(("_time", "_s", "_seconds", "_ms", "_timeout"))
    ]
    assert not suspicious


@pytest.mark.parametrize(
    "arguments",
    [["lint"], ["format", "--diff", "--exit-code", "--path", "protos/opentinkerapi"]],
    ids=lambda a: a[0],
)
def test_buf_is_content(arguments: list[str]) -> None:
    done = subprocess.run([BUF, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_vendored_protos_are_those_of_the_wheel() -> None:
    installed = Path(field_behavior_pb2.__file__).parents[2]
    vendored = sorted((protofiles.PROTOS / "third_party").rglob("*.proto"))
    assert vendored
    for path in vendored:
        name = path.relative_to(protofiles.PROTOS / "third_party")
        assert path.read_bytes() == (installed / name).read_bytes(), (
            f"{name} differs from the installed wheel's"
        )
