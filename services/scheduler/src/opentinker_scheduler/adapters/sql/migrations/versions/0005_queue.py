"""What jobs cost, their limits and times, and what projects used. Positions in the queue are not kept."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("cost_slots", sa.Float(), nullable=False, server_default="1"))
    for name in ("cost_gpus", "max_duration_s", "idle_limit_s", "held_s"):
        op.add_column("jobs", sa.Column(name, sa.Float(), nullable=False, server_default="0"))
    for name in ("grant_time", "progress_time"):
        op.add_column("jobs", sa.Column(name, sa.BigInteger(), nullable=True))
    op.drop_column("jobs", "queue_position")
    op.create_table(
        "usage",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("slot_seconds", sa.Float(), nullable=False),
        sa.Column("gpu_seconds", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("project", "day", name=op.f("pk_usage")),
    )
