"""Checkpoints that expire, objects that wait to be deleted, and everything a policy's tuning says."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("expire_time", sa.BigInteger(), nullable=True))
    for name in ("value_head", "activation_checkpointing"):
        op.add_column("policies", sa.Column(name, sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_table(
        "garbage",
        sa.Column("prefix", sa.String(length=255), nullable=False),
        sa.Column("due_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("prefix", name=op.f("pk_garbage")),
    )
