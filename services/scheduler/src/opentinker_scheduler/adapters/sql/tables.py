"""The tables. A test keeps them equal to what the migrations make.

Rules that must hold whatever the code does are constraints here: a slot has at most one owner (`one_owner`),
a place in a job is filled once (`one_slot`), a GPU has at most one owner and a version number is used once
(their primary keys).
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    CursorResult,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
    text,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UtcTime(TypeDecorator[datetime]):
    """An aware datetime, kept as microseconds since 1970."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else (value - EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else EPOCH + timedelta(microseconds=value)


# SQLite numbers rows by itself only in a column of exactly this type.
Serial = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)


def ordered(length: int) -> String:
    """A text that rows are ordered by, which is by its bytes in every database: PostgreSQL would otherwise
    compare as its machine's language does."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


def _serial() -> Column[int]:
    return Column("seq", Serial, primary_key=True, autoincrement=True)


leader = Table(
    "leader",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("cluster", String(63), nullable=False),
    Column("start_time", UtcTime, nullable=False),
    Column("holder", Text, nullable=False, server_default=""),
    Column("address", Text, nullable=False, server_default=""),
    Column("lease_until", BigInteger, nullable=False, server_default="0"),
)

jobs = Table(
    "jobs",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("project", String(63), nullable=False),
    Column("display_name", Text, nullable=False),
    Column("kind", String(20), nullable=False),
    Column("slots", JSON, nullable=False),
    Column("state", String(20), nullable=False),
    Column("state_reason", Text, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("error", JSON),
    Column("on_client_loss", String(20), nullable=False),
    Column("lease_ttl_s", Float, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("queue_time", UtcTime, nullable=False),
    Column("start_time", UtcTime),
    Column("end_time", UtcTime),
    Column("outcome_message", Text, nullable=False),
    Column("labels", JSON, nullable=False),
    Column("run", String(80), nullable=False),
    Column("crashes", JSON, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("cost_slots", Float, nullable=False, server_default="1"),
    Column("cost_gpus", Float, nullable=False, server_default="0"),
    Column("priority", Integer, nullable=False, server_default="0"),
    Column("max_duration_s", Float, nullable=False, server_default="0"),
    Column("idle_limit_s", Float, nullable=False, server_default="0"),
    Column("held_s", Float, nullable=False, server_default="0"),
    Column("grant_time", UtcTime),
    Column("progress_time", UtcTime),
    sqlite_autoincrement=True,
)
Index("ix_jobs_state", jobs.c.state)

servers = Table(
    "servers",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("role", String(20), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("base_digest", String(80), nullable=False),
    Column("options", JSON, nullable=False),
    Column("reported", JSON, nullable=False),
    Column("state", String(20), nullable=False),
    Column("address", Text, nullable=False),
    Column("slots_total", Integer, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("instance_id", Text, nullable=False),
    Column("own_id", Text, nullable=False),
    Column("launcher", String(20), nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("pid_start", Float, nullable=False),
    Column("log_path", Text, nullable=False),
    Column("start_time", UtcTime, nullable=False),
    Column("register_time", UtcTime),
    Column("end_time", UtcTime),
    Column("end_reason", Text, nullable=False),
    Column("exit_code", Integer),
    Column("devices", JSON, nullable=False, server_default="[]"),
    sqlite_autoincrement=True,
)
Index("ix_servers_state", servers.c.state)
Index("ix_servers_instance", servers.c.instance_id)

# Of servers that have not ended.
device_owners = Table(
    "device_owners",
    metadata,
    Column("device", Text, primary_key=True),
    Column("server_id", String(63), nullable=False),
)
Index("ix_device_owners_server", device_owners.c.server_id)

assignments = Table(
    "assignments",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("job_id", String(63), nullable=False),
    Column("server_id", String(63), nullable=False),
    Column("slot_no", Integer, nullable=False),
    Column("slot_index", Integer, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("role", String(20), nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("exclusive", Boolean, nullable=False),
    Column("state", String(20), nullable=False),
    Column("message", Text, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("change_time", UtcTime, nullable=False),
)
NOT_ENDED = text("state <> 'ended'")
_HELD = text("state IN ('granted', 'ready')")
Index(
    "active",
    assignments.c.job_id,
    assignments.c.slot_index,
    assignments.c.ordinal,
    sqlite_where=NOT_ENDED,
    postgresql_where=NOT_ENDED,
)
Index(
    "one_owner",
    assignments.c.server_id,
    assignments.c.slot_no,
    unique=True,
    sqlite_where=NOT_ENDED,
    postgresql_where=NOT_ENDED,
)
Index(
    "one_slot",
    assignments.c.job_id,
    assignments.c.slot_index,
    assignments.c.ordinal,
    unique=True,
    sqlite_where=_HELD,
    postgresql_where=_HELD,
)

Index("ix_assignments_job", assignments.c.job_id)

job_history = Table(
    "job_history",
    metadata,
    _serial(),
    Column("job_id", String(63), nullable=False),
    Column("time", UtcTime, nullable=False),
    Column("state", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)
Index("ix_job_history_job", job_history.c.job_id)

policies = Table(
    "policies",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("project", String(63), nullable=False),
    Column("job_id", String(63), nullable=False),
    Column("base_model", Text, nullable=False),
    Column("base_digest", String(80), nullable=False),
    Column("tuning", String(20), nullable=False),
    Column("rank", Integer, nullable=False),
    Column("alpha", Float),
    Column("target_modules", JSON, nullable=False),
    Column("seed", String(20), nullable=False),
    Column("display_name", Text, nullable=False),
    Column("latest_version", BigInteger, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("value_head", Boolean, nullable=False, server_default=false()),
    Column("activation_checkpointing", Boolean, nullable=False, server_default=false()),
    sqlite_autoincrement=True,
)
Index("ix_policies_job", policies.c.job_id)

versions = Table(
    "versions",
    metadata,
    Column("policy_id", String(63), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("sha256", String(64), nullable=False),
    Column("manifest_key", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("gone", Boolean, nullable=False, server_default=false()),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _serial(),
    Column("policy_id", String(63), nullable=False),
    Column("id", ordered(63), nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("manifest_key", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("display_name", Text, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("expire_time", UtcTime),
    sqlite_autoincrement=True,
)
Index("one_checkpoint", checkpoints.c.policy_id, checkpoints.c.id, unique=True)

garbage = Table(
    "garbage",
    metadata,
    Column("prefix", String(255), primary_key=True),
    Column("due_time", UtcTime, nullable=False),
)

deployments = Table(
    "deployments",
    metadata,
    _serial(),
    Column("project", String(63), nullable=False),
    Column("id", String(63), nullable=False),
    Column("model", Text, nullable=False),
    Column("slot", JSON, nullable=False),
    Column("job_id", String(63), nullable=False),
    Column("history", JSON, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("update_time", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)
Index("one_deployment", deployments.c.project, deployments.c.id, unique=True)

runs = Table(
    "runs",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("project", String(63), nullable=False),
    Column("display_name", Text, nullable=False),
    Column("job", String(80), nullable=False),
    Column("config_json", Text, nullable=False),
    Column("state", String(20), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("update_time", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)

metrics = Table(
    "metrics",
    metadata,
    Column("run_id", String(63), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("values", JSON, nullable=False),
    Column("time", UtcTime, nullable=False),
)

loop_states = Table(
    "loop_states",
    metadata,
    Column("run_id", String(63), primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("checkpoint", Text, nullable=False),
    Column("state", LargeBinary, nullable=False),
    Column("blob", JSON),
)

groups = Table(
    "groups",
    metadata,
    Column("run_id", String(63), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    Column("blob", JSON, nullable=False),
    Column("groups", Integer, nullable=False),
)

artifacts = Table(
    "artifacts",
    metadata,
    Column("run_id", String(63), primary_key=True),
    Column("name", ordered(255), primary_key=True),
    Column("blob", JSON, nullable=False),
    Column("media_type", String(127), nullable=False),
)

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    Column("create_time", UtcTime, nullable=False),
)

request_ids = Table(
    "request_ids",
    metadata,
    Column("scope", String(255), primary_key=True),
    Column("request_id", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("create_time", UtcTime, nullable=False),
)
Index("ix_request_ids_time", request_ids.c.create_time)

outbox = Table(
    "outbox",
    metadata,
    _serial(),
    Column("event_id", String(255), nullable=False),
    Column("fact", JSON, nullable=False),
    Column("occur_time", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)


def columns(table: Table) -> list[str]:
    """The columns that a record's fields fill; the store itself gives `seq`."""
    return [column.name for column in table.c if column.name != "seq"]


def serial(result: CursorResult[Any]) -> int:
    """The `seq` that an insert was given."""
    key = result.inserted_primary_key
    if key is None:
        raise RuntimeError("the insert made no row")
    return int(key[0])
