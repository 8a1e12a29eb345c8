"""Deployments: models served under a name of the user's choice."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "deployments",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("slot", sa.JSON(), nullable=False),
        sa.Column("job_id", sa.String(length=63), nullable=False),
        sa.Column("history", sa.JSON(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("update_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_deployments")),
        sqlite_autoincrement=True,
    )
    op.create_index("one_deployment", "deployments", ["project", "id"], unique=True)
