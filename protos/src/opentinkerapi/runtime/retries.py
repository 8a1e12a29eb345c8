"""Which calls gRPC itself may send again, as data (a gRPC service config).

Only UNAVAILABLE is retried, and only for calls that are safe to repeat: reads, and requests that carry a
`request_id` (a server answers their replay with the first answer). The list of methods is data beside this
module, derived from the descriptors (`python -m opentinkerapi.runtime.retries`; a test keeps it fresh). So a
channel needs no generated module, and clients in other languages can use the same file.
"""

import importlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor

import opentinkerapi

READ_VERBS = ("Get", "List", "Watch", "Score", "Tokenize", "Detokenize", "Render", "Resolve")

POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


@cache
def service_config() -> str:
    """The service config of every channel, as JSON text."""
    from importlib.resources import files  # here: with what it imports it takes 10 ms

    return (files("opentinkerapi.runtime") / "retries.json").read_text()


def derive(services: Iterable[ServiceDescriptor]) -> str:
    """The service config for these services, as JSON text."""
    names = [
        {"service": service.full_name, "method": method.name}
        for service in sorted(services, key=lambda service: service.full_name)
        for method in sorted(service.methods, key=lambda method: method.name)
        if repeatable(method)
    ]
    config = {"methodConfig": [{"name": names, "retryPolicy": POLICY}]} if names else {}
    return json.dumps(config, indent=1) + "\n"


def repeatable(method: MethodDescriptor) -> bool:
    """Whether a call of this method may be sent again without harm."""
    if method.client_streaming:
        # Sent again only by who knows what arrived: the caller, under the same seq and request id.
        return False
    return method.name.startswith(READ_VERBS) or _has_request_id(method.input_type)


def _has_request_id(message: Descriptor) -> bool:
    for field in message.fields:
        if field.name == "request_id":
            return True
        # A header, or (StreamSample) the request that is asked for in another form.
        part = field.name in ("header", "sample") and field.type == FieldDescriptor.TYPE_MESSAGE
        if part and field.message_type is not None and "request_id" in field.message_type.fields_by_name:
            return True
    return False


def all_services() -> list[ServiceDescriptor]:
    """Every service of the API."""
    # By name: a checkout beside an installed one is two roots with the same modules.
    services: dict[str, ServiceDescriptor] = {}
    for root in opentinkerapi.__path__:
        for path in sorted(Path(root).rglob("*_pb2.py")):
            name = ".".join(("opentinkerapi", *path.relative_to(root).with_suffix("").parts))
            found = importlib.import_module(name).DESCRIPTOR.services_by_name.values()
            services.update({service.full_name: service for service in found})
    return list(services.values())


if __name__ == "__main__":
    (Path(__file__).parent / "retries.json").write_text(derive(all_services()))
