"""Tokens, and what each job used."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("tokens_trained", "tokens_sampled"):
        op.add_column("usage", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "job_usage",
        sa.Column("seq", serial, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("slot_seconds", sa.Float(), nullable=False),
        sa.Column("gpu_seconds", sa.Float(), nullable=False),
        sa.Column("tokens_trained", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("tokens_sampled", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_job_usage")),
        sa.UniqueConstraint("job_id", name=op.f("uq_job_usage_job_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_usage_project", "job_usage", ["project", "seq"])
    op.create_table(
        "counted_tokens",
        sa.Column("server_id", sa.String(length=63), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("trained", sa.BigInteger(), nullable=False),
        sa.Column("sampled", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("server_id", "job_id", name=op.f("pk_counted_tokens")),
    )
