"""Runs migrations on the connection that noisescale_server.database hands over."""

from alembic import context

from noisescale_server.schema import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
