"""Who leads is a lease with a holder's name and address; on PostgreSQL, texts that order rows do by bytes."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_ORDERED = (("checkpoints", "id", 63), ("artifacts", "name", 255), ("members", "user_id", 63))


def upgrade() -> None:
    for name in ("holder", "address"):
        op.add_column("leader", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    op.add_column("leader", sa.Column("lease_until", sa.BigInteger(), nullable=False, server_default="0"))
    if op.get_bind().dialect.name == "postgresql":
        for table, column, length in _ORDERED:
            op.alter_column(table, column, type_=sa.String(length, collation="C"))
