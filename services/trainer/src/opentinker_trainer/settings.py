"""What a trainer can be told."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from opentinker_kit.settings import ServerSettings
from opentinker_trainer.rank_link import HOSTS_VARIABLE, RankHosts
from opentinkerapi.engine.v1 import trainer_engine_pb2


class TrainerSettings(ServerSettings):
    """OpenTinker trainer: one base model, many policies."""

    base_model: str
    """Model id, see `opentinker_kit.models`."""
    server_id: str = ""
    """Id that the scheduler launched it under."""
    slots: int = Field(default=8, ge=1)
    engine: Literal["torch", "noop"] = "torch"
    """`noop` trains nothing: for tests and benchmarks of what is around an engine."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Storage and matrix products of the base model; adapters and logprobs are float32 in any case."""
    forward_dtype: Literal["", "float32", "bfloat16", "float64"] = ""
    """Precision of passes; empty: `dtype`. float32 over a base stored in bfloat16 is for jobs whose gap
    between the logprobs of trainer and sampler asks for it: it costs time, and no memory for weights."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    threads: int = Field(default=0, ge=0)
    """Threads of an engine process; 0: its share of the cores. Part of what decides the bits of a result."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engine computes; on "cuda" rank r has GPU r, on a rank host its first one."""
    accelerator: str = ""
    """Type of the GPUs of this host, as in "H100"; told to the scheduler, for jobs that ask for one."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that a policy is spread over: rows are dealt to them, full-parameter policies are cut."""
    rank_hosts: list[str] = Field(default_factory=list)
    """`host:port` of the rank hosts (`python -m opentinker_trainer.rank_host`) of ranks 1 and up, in order;
    by default all ranks are processes of this machine. All of them have the base model at the same path."""
    rank_address: str = ""
    """What this machine is to the rank hosts; by default `listen_host`."""
    rank_key_file: Path | None = None
    """The key that the rank hosts have too (0600)."""
    context_parallel: int = 1
    """A sequence stays on one rank: anything but 1 is refused."""
    export_shard_bytes: int = Field(default=4 * 2**30, ge=1024)
    """Most bytes of one weight file of a full-parameter policy."""
    max_lora_rank: int = Field(default=64, ge=1)
    context_tokens: int = Field(default=0, ge=0)
    """Longest sample; 0: the model's context."""
    model_roots: list[Path] = Field(default_factory=list)
    model_cache_dir: Path | None = None
    allow_any_model_dir: bool = False

    micro_batch_tokens: int = Field(default=512, ge=1)
    micro_batch_rows: int = Field(default=0, ge=0)
    share_prefix: bool = True
    max_shared_row_tokens: int = Field(default=384, ge=1)
    pack_rows: bool = True
    """Rows of a micro-batch end to end instead of padded below each other (models with full attention and
    sdpa; others are padded)."""
    logit_rows: int = Field(default=256, ge=1)
    slice_tokens: int = Field(default=1024, ge=1)
    """A Forward or ForwardBackward runs in slices of about so many tokens, padding included; between two of
    them the other policies have their turns. Results do not depend on it."""

    lanes: int = Field(default=0, ge=0)
    """Micro-batches of an adapter that an engine process computes at once, each with its share of the
    threads; 0: two on a CPU where there are two threads, otherwise one. Part of what decides the bits of a
    result."""

    recovery_every_steps: int = Field(default=10, ge=1)
    """A recovery checkpoint after so many optimizer steps; a restart runs again what came after it."""
    keep_checkpoints: int = Field(default=0, ge=0)
    """How many checkpoints of a policy stay once another is saved, where SaveCheckpoint names no number;
    0: all."""
    checkpoint_ttl_s: float = Field(default=0.0, ge=0)
    """How long a checkpoint stays at least, where SaveCheckpoint names no time; 0: for ever."""
    publish_dir: Path | None = None
    """Where published weights lie for servers on this host; by default below `state_dir`."""
    keep_published: int = Field(default=4, ge=1)
    """How many versions of a policy stay in `publish_dir`; in the object store adapters stay for ever."""
    keep_model_versions: int = Field(default=4, ge=0)
    """Where versions are whole models, how many of a policy stay in the object store; 0: all."""
    upload_before_register: bool = False
    """Register a version only when its files are in the object store. By default the upload goes on beside:
    servers on this host read the local files, others wait for the objects, and the operation log keeps what
    is needed to make the files again until they are uploaded."""
    gap_timeout_s: float = Field(default=60.0, gt=0)
    scheduler_loss_s: float = Field(default=60.0, gt=0)
    max_operation_bytes: int = Field(default=256 * 2**20, ge=1)
    """Largest body of one operation."""
    max_pending_bytes: int = Field(default=1024 * 2**20, ge=1)
    """Bodies that are arriving or wait to run, all policies together."""
    memory_limit_bytes: int = Field(default=0, ge=0)
    """What policies may take beside the base model; 0: half of what is free once that is loaded."""

    @model_validator(mode="after")
    def _check_forward_dtype(self) -> Self:
        wider = (self.dtype, self.forward_dtype) == ("bfloat16", "float32")
        if self.forward_dtype not in ("", self.dtype) and not wider:
            raise ValueError(
                f"forward_dtype is {self.forward_dtype} over {self.dtype}: it may be the dtype itself, or "
                "float32 where that is bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.context_parallel != 1:
            raise ValueError(
                f"context_parallel is {self.context_parallel}: context parallelism is not supported, a "
                "sequence stays on one rank; spread rows over processes with ranks"
            )
        if self.ranks > 1 and self.engine == "noop":
            raise ValueError(f"ranks is {self.ranks}, and the noop engine is one process")
        if self.rank_hosts and len(self.rank_hosts) != self.ranks - 1:
            raise ValueError(
                f"rank_hosts names {len(self.rank_hosts)} hosts; ranks is {self.ranks}, so it must name "
                f"{self.ranks - 1}: each rank but the first has its own"
            )
        if self.rank_hosts and self.rank_key_file is None:
            raise ValueError("rank_hosts needs rank_key_file: what the rank hosts are asked with")
        return self

    @model_validator(mode="after")
    def _check_lanes(self) -> Self:
        if self.lanes > 1 and self.device != "cpu":
            raise ValueError(f"lanes is {self.lanes}, and on {self.device} micro-batches run one by one")
        if self.lanes > self.engine_threads():
            raise ValueError(
                f"lanes is {self.lanes}, and an engine process has {self.engine_threads()} threads"
            )
        return self

    def engine_env(self) -> Mapping[str, str]:
        """Variables of the engine beside its launch settings: where its ranks are, which decides no bit."""
        if not self.rank_hosts or self.rank_key_file is None:
            return {}
        address = self.rank_address or self.listen_host
        key_file = str(self.rank_key_file.absolute())
        return {HOSTS_VARIABLE: RankHosts(tuple(self.rank_hosts), address, key_file).encode()}

    def weight_bytes(self) -> int:
        """Size of a weight in the forward pass."""
        return {"float32": 4, "bfloat16": 2, "float64": 8}[self.forward_dtype or self.dtype]

    def engine_threads(self) -> int:
        """Of each process."""
        here = 1 if self.rank_hosts else self.ranks
        return self.threads or max(1, len(os.sched_getaffinity(0)) // here)

    def engine_lanes(self) -> int:
        """Of each process."""
        return self.lanes or (min(2, self.engine_threads()) if self.device == "cpu" else 1)

    def load_request(self, model_path: Path) -> trainer_engine_pb2.TrainLoadRequest:
        """The engine's launch settings."""
        return trainer_engine_pb2.TrainLoadRequest(
            model_path=str(model_path),
            model_id=self.base_model,
            dtype=self.dtype,
            forward_dtype=self.forward_dtype,
            attention=self.attention,
            threads=self.engine_threads(),
            micro_batch_tokens=self.micro_batch_tokens,
            micro_batch_rows=self.micro_batch_rows,
            share_prefix=self.share_prefix,
            max_shared_row_tokens=self.max_shared_row_tokens,
            logit_rows=self.logit_rows,
            pack_rows=self.pack_rows,
            device=self.device,
            ranks=self.ranks,
            export_shard_bytes=self.export_shard_bytes,
            slice_tokens=self.slice_tokens,
            lanes=self.engine_lanes(),
        )
