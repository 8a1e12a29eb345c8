"""What an inference server can be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from opentinker_kit.settings import ServerSettings


class InferenceSettings(ServerSettings):
    """OpenTinker inference: one base model, versions of its policies."""

    base_model: str
    """Model id, see `opentinker_kit.models`."""
    server_id: str = ""
    """Id that the scheduler launched it under."""
    slots: int = Field(default=8, ge=1)
    """How many jobs can share it; a merged server serves one policy, so it offers one."""
    engine: Literal["vllm", "transformers", "noop"] = "vllm"
    """`transformers` is deterministic; `noop` samples nothing real and is for tests around engines."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """"": bfloat16 for vllm, float32 for transformers."""
    serving_mode: Literal["", "adapter", "merged"] = ""
    """"": adapter, except for vllm on CPU, whose adapter kernels are slow: merged."""
    accelerator: str = ""
    """Type of the GPUs of this host, as in "H100"; told to the scheduler, for jobs that ask for one."""
    max_lora_rank: int = Field(default=64, ge=1, le=512)
    max_resident_versions: int = Field(default=8, ge=1)
    """Versions in memory at once, where adapters are served beside the base."""
    context_tokens: int = Field(default=0, ge=0)
    """Prompt and completion together; 0: the model's context."""
    threads: int = Field(default=0, ge=0)
    """Of the transformers engine; 0: one for each core (one for a toy model)."""
    kv_cache_bytes: int = Field(default=0, ge=0)
    """Of vllm; 0: 1 GiB on CPU, vllm's own choice on a GPU."""
    max_rows: int = Field(default=0, ge=0)
    """Sequences decoded at once; 0: the engine's choice."""
    max_pending_requests: int = Field(default=4096, ge=1)
    """Beyond this many unfinished requests new ones are refused as OVERLOADED."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """How often a Sample without news says that it is still running."""
    model_roots: list[Path] = Field(default_factory=list)
    model_cache_dir: Path | None = None
    allow_any_model_dir: bool = False
    engine_start_s: float = Field(default=600.0, gt=0)
    """An engine that is not up after so long is killed and started again."""
    scheduler_loss_s: float = Field(default=60.0, gt=0)
    """The server ends when no scheduler answered for so long."""
