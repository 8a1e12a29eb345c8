"""The first schema: jobs, servers, assignments, catalog, runs, requests, outbox."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "artifacts",
        sa.Column("run_id", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("blob", sa.JSON(), nullable=False),
        sa.Column("media_type", sa.String(length=127), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "name", name=op.f("pk_artifacts")),
    )
    op.create_table(
        "assignments",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("server_id", sa.String(length=63), nullable=False),
        sa.Column("slot_no", sa.Integer(), nullable=False),
        sa.Column("slot_index", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("exclusive", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("change_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_assignments")),
    )
    op.create_index(
        "one_owner",
        "assignments",
        ["server_id", "slot_no"],
        unique=True,
        sqlite_where=sa.text("state <> 'ended'"),
        postgresql_where=sa.text("state <> 'ended'"),
    )
    op.create_index(
        "one_slot",
        "assignments",
        ["job_id", "slot_index", "ordinal"],
        unique=True,
        sqlite_where=sa.text("state IN ('granted', 'ready')"),
        postgresql_where=sa.text("state IN ('granted', 'ready')"),
    )
    op.create_index(
        "active",
        "assignments",
        ["job_id", "slot_index", "ordinal"],
        sqlite_where=sa.text("state <> 'ended'"),
        postgresql_where=sa.text("state <> 'ended'"),
    )
    op.create_table(
        "blobs",
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_blobs")),
    )
    op.create_table(
        "checkpoints",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("policy_id", sa.String(length=63), nullable=False),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("manifest_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_checkpoints")),
        sqlite_autoincrement=True,
    )
    op.create_index("one_checkpoint", "checkpoints", ["policy_id", "id"], unique=True)
    op.create_table(
        "groups",
        sa.Column("run_id", sa.String(length=63), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("blob", sa.JSON(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_groups")),
    )
    op.create_table(
        "jobs",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("slots", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=False),
        sa.Column("queue_position", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("on_client_loss", sa.String(length=20), nullable=False),
        sa.Column("lease_ttl_s", sa.Float(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("queue_time", sa.BigInteger(), nullable=False),
        sa.Column("start_time", sa.BigInteger(), nullable=True),
        sa.Column("end_time", sa.BigInteger(), nullable=True),
        sa.Column("outcome_message", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("run", sa.String(length=80), nullable=False),
        sa.Column("crashes", sa.JSON(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_state", "jobs", ["state"], unique=False)
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("cluster", sa.String(length=63), nullable=False),
        sa.Column("start_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader")),
    )
    op.create_table(
        "loop_states",
        sa.Column("run_id", sa.String(length=63), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.Column("blob", sa.JSON(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_loop_states")),
    )
    op.create_table(
        "metrics",
        sa.Column("run_id", sa.String(length=63), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "outbox",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("event_id", sa.String(length=255), nullable=False),
        sa.Column("fact", sa.JSON(), nullable=False),
        sa.Column("occur_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_outbox")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "policies",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_digest", sa.String(length=80), nullable=False),
        sa.Column("tuning", sa.String(length=20), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Float(), nullable=True),
        sa.Column("target_modules", sa.JSON(), nullable=False),
        sa.Column("seed", sa.String(length=20), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("latest_version", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_policies")),
        sa.UniqueConstraint("id", name=op.f("uq_policies_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_policies_job", "policies", ["job_id"], unique=False)
    op.create_table(
        "request_ids",
        sa.Column("scope", sa.String(length=255), nullable=False),
        sa.Column("request_id", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "request_id", name=op.f("pk_request_ids")),
    )
    op.create_index("ix_request_ids_time", "request_ids", ["create_time"], unique=False)
    op.create_table(
        "runs",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.Text(), nullable=False),
        sa.Column("job", sa.String(length=80), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "servers",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("base_digest", sa.String(length=80), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("reported", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("slots_total", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("own_id", sa.Text(), nullable=False),
        sa.Column("launcher", sa.String(length=20), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("pid_start", sa.Float(), nullable=False),
        sa.Column("log_path", sa.Text(), nullable=False),
        sa.Column("start_time", sa.BigInteger(), nullable=False),
        sa.Column("register_time", sa.BigInteger(), nullable=True),
        sa.Column("end_time", sa.BigInteger(), nullable=True),
        sa.Column("end_reason", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_servers")),
        sa.UniqueConstraint("id", name=op.f("uq_servers_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_servers_instance", "servers", ["instance_id"], unique=False)
    op.create_index("ix_servers_state", "servers", ["state"], unique=False)
    op.create_table(
        "versions",
        sa.Column("policy_id", sa.String(length=63), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("manifest_key", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("policy_id", "version", name=op.f("pk_versions")),
    )
