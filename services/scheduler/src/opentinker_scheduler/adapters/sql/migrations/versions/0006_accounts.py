"""Users, projects, members, API keys, and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def _serial() -> sa.Column[int]:
    return sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)


def upgrade() -> None:
    op.create_table(
        "users",
        _serial(),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_users")),
        sa.UniqueConstraint("id", name=op.f("uq_users_id")),
        sa.UniqueConstraint("display_name", name=op.f("uq_users_display_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "projects",
        _serial(),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_projects")),
        sa.UniqueConstraint("id", name=op.f("uq_projects_id")),
        sa.UniqueConstraint("display_name", name=op.f("uq_projects_display_name")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "members",
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user_id", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.PrimaryKeyConstraint("project", "user_id", name=op.f("pk_members")),
    )
    op.create_table(
        "api_keys",
        _serial(),
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("user_id", sa.String(length=63), nullable=False),
        sa.Column("role", sa.String(length=20), nullable=False),
        sa.Column("display_name", sa.String(length=200), nullable=False),
        sa.Column("create_time", sa.BigInteger(), nullable=False),
        sa.Column("expire_time", sa.BigInteger(), nullable=True),
        sa.Column("revoke_time", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("id", name=op.f("uq_api_keys_id")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_keys_sha256")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "audit",
        _serial(),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("project", sa.String(length=63), nullable=False),
        sa.Column("caller", sa.String(length=80), nullable=False),
        sa.Column("api_key", sa.String(length=80), nullable=False),
        sa.Column("method", sa.String(length=200), nullable=False),
        sa.Column("resource", sa.String(length=255), nullable=False),
        sa.Column("outcome", sa.String(length=63), nullable=False),
        sa.Column("peer", sa.String(length=127), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_project", "audit", ["project", "seq"], unique=False)
    op.create_index("ix_audit_time", "audit", ["time"], unique=False)
    # What was there before belongs to the project that a cluster begins with.
    projects = sa.table(
        "projects", sa.column("id"), sa.column("display_name"), sa.column("create_time", sa.BigInteger())
    )
    op.bulk_insert(projects, [{"id": "default", "display_name": "default", "create_time": 0}])
