"""Weights that somebody else made, as the start of a policy: fetched, checked, then given to an engine.

Shapes and names are the engine's to check. What is checked here is what it could not tell: that the files are
what was uploaded, and that their configuration gives them the meaning they will have here.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_kit.safetensors_header import check_finite
from opentinker_kit.weight_configs import config_mismatch, unhonoured_option
from opentinker_trainer.application.store import PolicyStore
from opentinker_trainer.domain.tuning import LoraSpec, TuningSpec
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
_ADAPTER_FILES = re.compile(r"adapter_(config\.json|model\.safetensors)")
_MODEL_FILES = re.compile(
    r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
_DTYPES = ("F32", "BF16", "F16")

Files = Sequence[trainer_service_pb2.WeightFile]


def check_names(files: Files, spec: TuningSpec) -> None:
    """ServiceError INVALID_FIELD unless the files are those of a directory of the tuning's layout."""
    lora = isinstance(spec, LoraSpec)
    pattern, config = (_ADAPTER_FILES, ADAPTER_CONFIG) if lora else (_MODEL_FILES, MODEL_CONFIG)
    layout = "PEFT" if lora else "Hugging Face"
    names = [file.name for file in files]
    for index, name in enumerate(names):
        if not pattern.fullmatch(name) or name in names[:index]:
            text = f"{name!r} is no file of a {layout} directory of weights, or is there twice"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"import_files[{index}].name")
    if config not in names or not any(name.endswith(".safetensors") for name in names):
        text = f"a {layout} directory has {config} and its weights as safetensors; there are {names}"
        raise ServiceError(Reason.INVALID_FIELD, text, field="import_files")


async def fetch_import(
    store: PolicyStore,
    files: Files,
    project: str,
    directory: Path,
    spec: TuningSpec,
    base_model: str,
    model_dir: Path,
) -> None:
    """Bring files that a project uploaded into a directory. ServiceError names the one that is not what it
    should be.

    BLOB_NOT_FOUND, DIGEST_MISMATCH, INVALID_WEIGHTS. `model_dir` is the base model's folder.
    """
    for file in files:
        await store.fetch_blob(file.blob, directory / file.name, project, what=file.name)
    await asyncio.to_thread(_check, directory, spec, base_model, model_dir)


def _check(directory: Path, spec: TuningSpec, base_model: str, model_dir: Path) -> None:
    if isinstance(spec, LoraSpec):
        _check_adapter(_read(directory / ADAPTER_CONFIG), spec, base_model)
    elif (model_dir / MODEL_CONFIG).is_file():
        mismatch = config_mismatch(_read(directory / MODEL_CONFIG), _read(model_dir / MODEL_CONFIG))
        if mismatch is not None:
            raise _invalid(MODEL_CONFIG, mismatch)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            check_finite(path, _DTYPES)
        except ServiceError as error:
            raise _invalid(path.name, error.message) from error


def _check_adapter(config: Mapping[str, Any], spec: LoraSpec, base_model: str) -> None:
    option = unhonoured_option(config)
    if option is None and config.get("use_rslora"):
        option = "use_rslora = True"
    if option is not None:
        raise _invalid(ADAPTER_CONFIG, f"{option} is set, which is not supported")
    for name, given, asked in (
        ("r", config.get("r"), spec.rank),
        ("lora_alpha", config.get("lora_alpha"), spec.alpha),
    ):
        if given != asked:
            raise _invalid(ADAPTER_CONFIG, f"{name} is {given!r} there, {asked:g} in the policy's tuning")
    made_for = str(config.get("base_model_name_or_path") or "")
    if made_for and _last_part(made_for) != _last_part(base_model):
        text = (
            f"it was made for {made_for!r}, this policy is over {base_model!r}; where these are the same "
            "weights, say so in base_model_name_or_path"
        )
        raise _invalid(ADAPTER_CONFIG, text)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _invalid(path.name, "it cannot be read") from error


def _invalid(name: str, text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_WEIGHTS, f"{name}: {text}", field=f"import_files[{name}]")
