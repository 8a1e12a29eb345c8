"""Versions whose weights were deleted: the numbers stay taken."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("versions", sa.Column("gone", sa.Boolean(), nullable=False, server_default=sa.false()))
