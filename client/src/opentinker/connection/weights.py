"""Weights as directories on this machine: taken in as the start of a policy, written out for other libraries.

A PEFT directory (adapter_config.json, adapter_model.safetensors) is an adapter, a Hugging Face directory
(config.json, model.safetensors or shards of it) a whole model. Nothing here reads pickled files.
"""

import asyncio
import json
import shutil
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker import errors
from opentinker.connection.blobs import Blobs
from opentinker.connection.calls import ControlPlane
from opentinker.training.tuning import Full, LoRA, Tuning
from opentinkerapi.catalog.v1 import catalog_service_pb2
from opentinkerapi.catalog.v1.catalog_service_pb2_grpc import CatalogServiceStub
from opentinkerapi.trainer.v1 import trainer_service_pb2

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
MODEL_CONFIG, MODEL, MODEL_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_directory(directory: str | Path, tuning: Tuning | None) -> tuple[Tuning, list[Path]]:
    """The tuning that a directory's weights need, and its files. InvalidArgument if `tuning` is another."""
    folder = Path(directory)
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter(folder, tuning), [folder / ADAPTER_CONFIG, _there(folder / ADAPTER)]
    if not (folder / MODEL_CONFIG).is_file():
        raise _invalid(f"{folder} has neither {ADAPTER_CONFIG} (PEFT) nor {MODEL_CONFIG} (Hugging Face)")
    if tuning is None:
        tuning = Full()
    elif not isinstance(tuning, Full):
        raise _invalid(f"{folder} holds a whole model; its policy is one of tuning=Full(...), not {tuning!r}")
    files = [folder / MODEL_CONFIG]
    if (folder / MODEL_INDEX).is_file():
        shards = set(_json(folder / MODEL_INDEX).get("weight_map", {}).values())
        files += [folder / MODEL_INDEX, *(_there(folder / str(name)) for name in sorted(shards))]
    else:
        files.append(_there(folder / MODEL))
    return tuning, files


async def upload(files: Sequence[Path], blobs: Blobs) -> list[trainer_service_pb2.WeightFile]:
    """Store files for a CreatePolicy; those that are stored already are not sent again."""
    return [
        trainer_service_pb2.WeightFile(name=path.name, blob=await blobs.upload_file(path)) for path in files
    ]


async def export(control: ControlPlane, blobs: Blobs, name: str, directory: str | Path) -> Path:
    """Write the weights of a version or checkpoint into a new directory, which appears whole or not at all.

    AlreadyExists if there is something there, DataLoss if a file is not what was recorded.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.AlreadyExists(f"{target} is there already", reason=errors.Reason.INVALID_FIELD)
    request = catalog_service_pb2.ExportWeightsRequest(name=name)

    async def ask() -> catalog_service_pb2.ExportWeightsResponse:
        return await control.call(lambda channel: CatalogServiceStub(channel).ExportWeights(request))

    incoming = target.absolute().parent / f".{target.name}.incoming-{uuid.uuid4().hex[:8]}"
    incoming.mkdir(parents=True)
    try:
        for file in (await ask()).files:

            async def url(wanted: str = file.name) -> str:
                # Signed anew for each try: the first signature may be over by then.
                return next(each.url for each in (await ask()).files if each.name == wanted)

            if Path(file.name).name != file.name:
                raise errors.DataLoss(
                    f"{name} names a file {file.name!r}", reason=errors.Reason.DIGEST_MISMATCH
                )
            await blobs.fetch_file(url, incoming / file.name, file.sha256)
        incoming.rename(target)
    except OSError as error:
        raise errors.StorageFull(
            f"{target} cannot be written: {error.strerror}", reason=errors.Reason.STORAGE_FULL
        ) from error
    finally:
        await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)
    return target


def _adapter(folder: Path, tuning: Tuning | None) -> LoRA:
    config = _json(folder / ADAPTER_CONFIG)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise _invalid(f"{folder / ADAPTER_CONFIG} has no rank (r) and lora_alpha: {rank!r} and {alpha!r}")
    targets = _targets(folder / ADAPTER)
    if tuning is None:
        return LoRA(rank=rank, alpha=float(alpha), target_modules=targets)
    if not isinstance(tuning, LoRA):
        raise _invalid(f"{folder} holds an adapter; its policy is one of tuning=LoRA(...), not {tuning!r}")
    there = {"rank": rank, "alpha": float(alpha), "target_modules": targets}
    asked = {"rank": tuning.rank, "alpha": float(tuning.alpha)}
    if tuning.target_modules:
        asked["target_modules"] = sorted(set(tuning.target_modules))  # type: ignore[assignment]
    for name, value in asked.items():
        if there[name] != value:
            raise _invalid(f"the adapter in {folder} has {name} {there[name]!r}, tuning has {value!r}")
    return LoRA(rank, float(alpha), targets, tuning.value_head, tuning.activation_checkpointing)


def _targets(path: Path) -> list[str]:
    """Leaf names of the layers that an adapter's tensors belong to."""
    parts = [name.split(".") for name in _tensor_names(_there(path))]
    return sorted({part[-3] for part in parts if len(part) > 2 and part[-2] in ("lora_A", "lora_B")})


def _tensor_names(path: Path) -> list[str]:
    """Names in a safetensors file: a length of 8 bytes, a JSON object of that length, then the data."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError
            header: Mapping[str, Any] = json.loads(file.read(length))
        return [name for name in header if name != "__metadata__"]
    except (OSError, ValueError, struct.error, TypeError) as error:
        raise _invalid(f"{path} is no safetensors file") from error


def _there(path: Path) -> Path:
    if not path.is_file():
        raise _invalid(f"{path} is missing; weights are read from safetensors files only")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _invalid(f"{path} cannot be read") from error


def _invalid(text: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(text, reason=errors.Reason.INVALID_WEIGHTS, field="from_weights")
