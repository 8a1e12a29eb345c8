"""Alembic's entry: runs the migrations on the connection it is handed."""

from alembic import context

from opentinker_scheduler.adapters.sql.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
