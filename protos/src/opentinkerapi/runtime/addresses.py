"""Several addresses of one service, of which one serves: those of a scheduler and its replicas.

`host:port,host:port`, or `dns:///name:port` where a name has several addresses. A channel then asks each for
its health and sends calls to those that say SERVING, as gRPC does by itself when it is told to in the service
config.
"""

import contextlib
import ipaddress
import json
import socket

from opentinkerapi.runtime.retries import service_config


def is_several(address: str) -> bool:
    """Whether an address may stand for several servers."""
    return "," in address or address.startswith("dns:///")


def target(address: str) -> str:
    """What gRPC calls the address.

    gRPC takes lists of IP addresses and no lists of names: names in a list are looked up here, once. Names
    whose addresses change belong into the DNS as one name.
    """
    if "," not in address:
        return address
    found = [each for part in address.split(",") if part.strip() for each in _look_up(part.strip())]
    if not found:
        raise OSError(f"none of the names in {address!r} can be looked up")
    if all(ip.version == 4 for ip, _ in found):
        return "ipv4:" + ",".join(f"{ip}:{port}" for ip, port in found)
    mapped = (f"::ffff:{ip}" if ip.version == 4 else str(ip) for ip, _ in found)
    return "ipv6:" + ",".join(f"[{ip}]:{port}" for ip, (_, port) in zip(mapped, found, strict=True))


def authority(address: str) -> str:
    """The name that a certificate of these servers is checked against: the first one's."""
    return address.removeprefix("dns:///").split(",")[0].strip()


def balanced_config() -> str:
    """The service config of channels to several servers: that of all channels, with health."""
    config = json.loads(service_config())
    config["loadBalancingConfig"] = [{"round_robin": {}}]
    config["healthCheckConfig"] = {"serviceName": ""}
    return json.dumps(config)


def _look_up(part: str) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    host, _, port = part.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{part!r} is no address; they look like host:port")
    host = host.strip("[]")
    with contextlib.suppress(ValueError):
        return [(ipaddress.ip_address(host), int(port))]
    with contextlib.suppress(socket.gaierror):
        names = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        return [(ipaddress.ip_address(str(name[4][0]).split("%")[0]), int(port)) for name in names]
    return []
