"""What became of jobs, and which servers they were on."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "job_history",
        sa.Column(
            "seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_job_history")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_job_history_job", "job_history", ["job_id"])
    op.create_index("ix_assignments_job", "assignments", ["job_id"])
