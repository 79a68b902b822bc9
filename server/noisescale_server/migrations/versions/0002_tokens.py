"""Tokens, who made a run, and which layer groups it has."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table of tokens, and the columns that limits are counted by."""
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("scope", sa.String(8), nullable=False),
        sa.Column("prefix", sa.String(128), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=True),
        sa.Column("revoked_at", sa.Double, nullable=True),
    )
    op.add_column("runs", sa.Column("token", sa.String(160), nullable=True))
    op.add_column("runs", sa.Column("groups", sa.Text, nullable=False, server_default=""))
    op.create_index("runs_token", "runs", ["token"])


def downgrade() -> None:
    """Remove them; every token made by the command is lost."""
    op.drop_index("runs_token", "runs")
    with op.batch_alter_table("runs") as batch:
        batch.drop_column("groups")
        batch.drop_column("token")
    op.drop_table("tokens")
