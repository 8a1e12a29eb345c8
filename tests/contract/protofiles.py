"""The proto files as data, comments included: protoc's own view, not a parser of ours.

The module of an extension must be imported before what carries it is parsed, hence all of it is here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from google.api import field_behavior_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
REASON_PREFIX = "ERROR_REASON_"

# Numbers of the fields in descriptor.proto that a comment's path goes through.
MESSAGE, ENUM, SERVICE, METHOD_OF_SERVICE = 4, 5, 6, 2
VALUE_OF_ENUM = 2


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC with the comment that documents it."""

    service: str
    proto: MethodDescriptorProto
    comment: str

    @property
    def name(self) -> str:
        return f"{self.service}.{self.proto.name}"

    def documented(self, label: str) -> str | None:
        """What the comment says after `label:`, up to the final full stop, on one line."""
        found = re.search(rf"^\s*{label}:\s*(.+?)\s*\Z", self._part(label), re.MULTILINE | re.DOTALL)
        return " ".join(found.group(1).split()) if found else None

    def _part(self, label: str) -> str:
        """The lines from `label:` to the next label or the end."""
        lines, keep = [], False
        for line in self.comment.splitlines():
            starts = re.match(r"\s*([A-Z]\w+):", line)
            if starts:
                keep = starts.group(1) == label
            if keep:
                lines.append(line)
        return "\n".join(lines)

    @property
    def errors(self) -> list[str]:
        """Reasons that the comment lists, without the enum's prefix."""
        return re.findall(r"\b[A-Z][A-Z0-9_]+\b", self.documented("Errors") or "")


@cache
def proto_files() -> tuple[FileDescriptorProto, ...]:
    """Every file of ours, in path order, with source locations."""
    sources = sorted(
        path.relative_to(PROTOS).as_posix() for path in (PROTOS / "opentinkerapi").rglob("*.proto")
    )
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "set.binpb"
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                f"--proto_path={PROTOS / 'third_party'}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                *sources,
            ]
        )
        assert status == 0, "protoc refused the proto files"
        return tuple(FileDescriptorSet.FromString(out.read_bytes()).file)


def comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Leading comment by descriptor path."""
    return {tuple(place.path): place.leading_comments for place in file.source_code_info.location}


def methods() -> list[Method]:
    found = []
    for file in proto_files():
        texts = comments(file)
        for s, service in enumerate(file.service):
            for m, method in enumerate(service.method):
                comment = texts.get((SERVICE, s, METHOD_OF_SERVICE, m), "")
                found.append(Method(f"{file.package}.{service.name}", method, comment))
    return found


def reasons() -> dict[str, str]:
    """Comment of each error reason, by name without the prefix; the unspecified one is left out."""
    found = {}
    for file in proto_files():
        texts = comments(file)
        for e, enum in enumerate(file.enum_type):
            if enum.name == "ErrorReason":
                for v, value in enumerate(enum.value):
                    if value.number:
                        comment = texts.get((ENUM, e, VALUE_OF_ENUM, v), "")
                        found[value.name.removeprefix(REASON_PREFIX)] = " ".join(comment.split())
    return found


def messages() -> dict[str, DescriptorProto]:
    """Every message by its full name with a leading dot, as fields refer to it, nested ones included."""
    found: dict[str, DescriptorProto] = {}

    def add(prefix: str, message: DescriptorProto) -> None:
        found[f"{prefix}.{message.name}"] = message
        for nested in message.nested_type:
            add(f"{prefix}.{message.name}", nested)

    for file in proto_files():
        for message in file.message_type:
            add(f".{file.package}", message)
    return found


def says_behavior(field: FieldDescriptorProto) -> bool:
    """Whether the field carries google.api.field_behavior."""
    return bool(field.options.Extensions[field_behavior_pb2.field_behavior])


def request_fields(method: Method) -> Iterator[tuple[str, FieldDescriptorProto]]:
    """Fields that a caller fills in: the request's and those of the messages of ours below it, each once."""
    known, seen, waiting = messages(), set(), [method.proto.input_type]
    while waiting:
        name = waiting.pop()
        if name in seen or name not in known or known[name].options.map_entry:
            continue
        seen.add(name)
        for field in known[name].field:
            yield f"{name[1:]}.{field.name}", field
            if field.type == FieldDescriptorProto.TYPE_MESSAGE:
                waiting.append(field.type_name)
