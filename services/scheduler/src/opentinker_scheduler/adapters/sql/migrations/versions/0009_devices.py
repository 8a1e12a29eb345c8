"""GPUs that servers have: one owner each."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("servers", sa.Column("devices", sa.JSON(), nullable=False, server_default="[]"))
    op.create_table(
        "device_owners",
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("server_id", sa.String(length=63), nullable=False),
        sa.PrimaryKeyConstraint("device", name=op.f("pk_device_owners")),
    )
    op.create_index("ix_device_owners_server", "device_owners", ["server_id"])
