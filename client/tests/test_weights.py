"""Directories of weights: what they say of themselves, and exports that are whole or not there."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from opentinker.connection import weights
from opentinker.connection.blobs import Blobs
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb

NAME = "policies/p/versions/1"


def write_tensors(path: Path, names: list[str]) -> None:
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def adapter(directory: Path, **config: object) -> Path:
    directory.mkdir()
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ".*_proj"} | config
    (directory / weights.ADAPTER_CONFIG).write_text(json.dumps(settings))
    layers = ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.0.mlp.up_proj")
    names = [f"base_model.model.model.{layer}.lora_{x}.weight" for layer in layers for x in "AB"]
    write_tensors(directory / weights.ADAPTER, names)
    return directory


def test_an_adapter_says_what_its_policy_trains(tmp_path: Path) -> None:
    directory = adapter(tmp_path / "a")
    want = ot.LoRA(rank=4, alpha=8.0, target_modules=["q_proj", "up_proj"])
    tuning, files = weights.read_directory(directory, None)
    assert tuning.to_wire() == want.to_wire()
    assert [path.name for path in files] == [weights.ADAPTER_CONFIG, weights.ADAPTER]
    asked = ot.LoRA(rank=4, alpha=8.0, value_head=True)
    assert weights.read_directory(directory, asked)[0].to_wire().value_head
    for other, says in (
        (ot.LoRA(rank=8, alpha=8.0), "rank 4"),
        (ot.LoRA(rank=4, alpha=16.0), "alpha 8.0"),
        (ot.LoRA(rank=4, alpha=8.0, target_modules=["q_proj"]), "target_modules"),
        (ot.Full(), "LoRA"),
    ):
        with pytest.raises(ot.errors.InvalidArgument, match=says) as refused:
            weights.read_directory(directory, other)
        assert refused.value.field == "from_weights"


def test_a_model_needs_full_tuning_and_all_its_shards(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ot.errors.InvalidArgument, match="is missing"):
        weights.read_directory(tmp_path, None)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    (tmp_path / weights.MODEL_INDEX).write_text(json.dumps(index))
    write_tensors(tmp_path / shards[0], ["a", "c"])
    with pytest.raises(ot.errors.InvalidArgument, match="00002"):
        weights.read_directory(tmp_path, ot.Full())
    write_tensors(tmp_path / shards[1], ["b"])
    tuning, files = weights.read_directory(tmp_path, None)
    assert isinstance(tuning, ot.Full)
    assert [path.name for path in files] == ["config.json", weights.MODEL_INDEX, *shards]
    with pytest.raises(ot.errors.InvalidArgument, match="Full"):
        weights.read_directory(tmp_path, ot.LoRA())


@pytest.mark.parametrize("broken", ["nothing", "pickle", "no rank", "junk"])
def test_what_is_no_directory_of_weights(broken: str, tmp_path: Path) -> None:
    directory = tmp_path / "a"
    if broken == "nothing":
        directory.mkdir()
    else:
        adapter(directory, **({"r": None} if broken == "no rank" else {}))
    if broken == "pickle":
        (directory / weights.ADAPTER).rename(directory / "adapter_model.bin")
    if broken == "junk":
        (directory / weights.ADAPTER).write_bytes(b"PK\x03\x04 a zip file, not tensors")
    with pytest.raises(ot.errors.InvalidArgument):
        weights.read_directory(directory, None)


class Control:
    """Answers every call with one export, whose addresses are files of this machine."""

    def __init__(self, *files: pb.ExportedFile) -> None:
        self.files = files

    async def call(self, method: Any) -> pb.ExportWeightsResponse:
        return pb.ExportWeightsResponse(kind="lora", files=self.files)


def exported(path: Path, data: bytes, name: str = "") -> pb.ExportedFile:
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return pb.ExportedFile(name=name or path.name, sha256=sha256, size_bytes=len(data), url=path.as_uri())


async def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "deep" / "out"
    store.mkdir()
    files = (exported(store / "a", b"1" * 3_000_000), exported(store / "b", b"2"))

    async def export(*wanted: pb.ExportedFile) -> Path:
        control: Any = Control(*wanted)
        return await weights.export(control, Blobs(control), NAME, out)

    (store / "b").write_bytes(b"3")
    with pytest.raises(ot.errors.DataLoss, match="b has other bytes"):
        await export(*files)
    with pytest.raises(ot.errors.DataLoss, match="names a file"):
        await export(files[0], exported(store / "c", b"x", "../c"))
    assert list(out.parent.iterdir()) == []
    (store / "b").write_bytes(b"2")
    assert await export(*files) == out
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"a": b"1" * 3_000_000, "b": b"2"}
    with pytest.raises(ot.errors.AlreadyExists, match="there already"):
        await export(*files)
    assert list(out.parent.iterdir()) == [out]
