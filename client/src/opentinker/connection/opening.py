"""How a cluster is connected to: one that runs somewhere, or an embedded stack on this machine."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentinker import errors
from opentinker.connection.calls import ControlPlane
from opentinker.connection.cluster import Cluster, active
from opentinker.connection.portal import Portal
from opentinkerapi.runtime import tracing
from opentinkerapi.scheduler.v1 import scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from opentinker.connection.stack import EmbeddedStack
    from opentinkerapi.runtime.tls import TlsFiles

FIRST_ANSWER_S = 10.0
"""How long a cluster that was named may take to answer at all."""

ADDRESS_VARIABLE = "OPENTINKER_ADDRESS"
KEY_VARIABLE = "OPENTINKER_API_KEY"
TRACES_ENDPOINT, TRACES_FILE = "OPENTINKER_TRACES_ENDPOINT", "OPENTINKER_TRACES_FILE"

_default_lock = threading.Lock()


def connect(
    address: str | None = None,
    *,
    key: str | None = None,
    tls_ca: str | Path | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_server_name: str = "",
    state_dir: str | Path | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool | None = None,
) -> Cluster:
    """Connect to a cluster. Use it as a context manager, plain or async.

    `address` (host:port of a scheduler; also OPENTINKER_ADDRESS) and `key` (OPENTINKER_API_KEY) name a
    cluster that runs. Without an address an embedded stack is started under `state_dir` as a child of this
    process, or one that runs there is used; what this call started ends with the cluster object, what was
    there stays. Where the address begins with `grpcs://`, or one of the PEM files `tls_ca`, `tls_cert` and
    `tls_key` is named (also OPENTINKER_TLS_CA, _CERT and _KEY), all servers of the cluster are called by TLS:
    they must show a certificate that `tls_ca` signed (by default one of the system's authorities) for the
    name that they are called by, or for `tls_server_name` (OPENTINKER_TLS_SERVER_NAME); `tls_cert` is shown
    to servers that ask for one.

    `settings` are passed to a stack that is started. `progress` shows on stderr what is waited
    for (default: on a terminal).

    Raises MissingDependency where the embedded stack is not installed, LaunchFailed with the reason and its
    log where it does not start, Unavailable and Unauthenticated where a cluster does not answer or refuses
    the key, TlsFailed where no TLS connection comes about.
    """
    from opentinker.connection.notices import notices

    traces = os.environ.get(TRACES_ENDPOINT, ""), os.environ.get(TRACES_FILE)
    tracing.configure("client", endpoint=traces[0], file=traces[1])
    address = address or (None if state_dir is not None else os.environ.get(ADDRESS_VARIABLE))
    with notices(progress) as say:
        embedded, tls = None, None
        named = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        named["tls_server_name"] = tls_server_name
        if address is None:
            for field, value in named.items():
                if value:
                    raise errors.invalid(field, "only for a cluster that is named by its address")
            from opentinker.connection.stack import start_or_attach

            embedded = start_or_attach(state_dir, settings or {}, say)
        elif settings or state_dir is not None:
            raise errors.invalid(
                "state_dir" if state_dir is not None else "settings", "only for an embedded stack"
            )
        else:
            tls = _tls(address, named)
        portal = Portal().start()
        try:
            cluster = portal.run(_open(portal, address, key, tls, embedded, progress))
        except BaseException:
            portal.close()
            if embedded is not None:
                embedded.stop()
            raise
    return cluster


async def _open(
    portal: Portal,
    address: str | None,
    key: str | None,
    tls: "TlsFiles | None",
    embedded: "EmbeddedStack | None",
    progress: bool | None,
) -> Cluster:
    from opentinker.connection.notices import watcher

    locate: Callable[[], str]
    if embedded is not None:
        locate, key = embedded.locate, key or embedded.key
        control = ControlPlane(locate, key, obituary=embedded.obituary)
    else:
        assert address is not None
        named = address
        control = ControlPlane(lambda: named, key or os.environ.get(KEY_VARIABLE), tls=tls)
    cluster = Cluster(portal, control, embedded=embedded, watcher=watcher(progress))
    try:
        await control.call(
            lambda channel: SchedulerServiceStub(channel).GetCluster(
                scheduler_service_pb2.GetClusterRequest()
            ),
            patience_s=FIRST_ANSWER_S,
        )
    except BaseException:
        await control.close()
        raise
    return cluster


def _tls(address: str, named: Mapping[str, str | Path | None]) -> "TlsFiles | None":
    """What the connection shows and trusts; None where it is made without TLS."""
    from opentinkerapi.runtime.tls import TlsFiles, read_files, split_address

    secure, where = split_address(address)
    if secure is False:
        for field, value in named.items():
            if value:
                text = f"{address} is called without TLS; use the address grpcs://{where}"
                raise errors.invalid(field, text)
        return None
    values = {field: value or os.environ.get(f"OPENTINKER_{field.upper()}") for field, value in named.items()}
    if not any(values.values()):
        return TlsFiles() if secure else None
    return read_files(
        values["tls_ca"] or None,
        values["tls_cert"] or None,
        values["tls_key"] or None,
        str(values["tls_server_name"] or ""),
    )


def active_cluster() -> Cluster:
    """The innermost cluster whose `with` block is open; otherwise one that is connected now and closed at
    exit.
    """
    if active:
        return active[-1]
    with _default_lock:
        if not active:
            import atexit

            cluster = connect()
            active.append(cluster)
            atexit.register(cluster.close)
    return active[-1]
