"""The GPUs of this host, as far as it can be seen without their libraries."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from opentinker_scheduler.domain.nodes import Node

_CHOSEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def this_node(gpus: Sequence[str] | None, accelerator: str, dev: Path = Path("/dev")) -> Node | None:
    """This host with these GPUs, by default those that are found. None where nothing is known of any."""
    ids = tuple(find_gpus(dev) if gpus is None else gpus)
    if gpus is None and not ids and not accelerator:
        return None
    return Node(socket.gethostname(), len(ids), accelerator, ids)


def find_gpus(dev: Path = Path("/dev")) -> list[str]:
    """What CUDA or ROCm will call the GPUs that a process of this host sees; this process may have been given
    only some of them."""
    for name in _CHOSEN:
        if name in os.environ:
            return [each.strip() for each in os.environ[name].split(",") if each.strip()]
    if found := list(dev.glob("nvidia[0-9]*")):
        return [str(number) for number in range(len(found))]
    if (dev / "kfd").exists():
        return [str(number) for number in range(len(list(dev.glob("dri/renderD*"))))]
    return []
