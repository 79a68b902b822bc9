"""How far each segment has been merged, and how much came to a run since it was last looked at."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Count what came before this version as not looked at."""
    op.add_column("segments", sa.Column("level", sa.Integer, nullable=False, server_default="0"))
    op.add_column("runs", sa.Column("pending_blocks", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE runs SET pending_blocks = "
        "(SELECT COALESCE(SUM(blocks), 0) FROM segments WHERE segments.run_id = runs.id)"
    )
    # Not as a batch: on SQLite that makes the table of runs anew, and removing the old one removes, by the
    # foreign keys, every segment.
    op.drop_column("runs", "merged_until")
    op.drop_column("runs", "merged_measured_steps")


def downgrade() -> None:
    """Bring back the columns, which nothing had written to yet."""
    for name in ("merged_until", "merged_measured_steps"):
        op.add_column("runs", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.drop_column("runs", "pending_blocks")
    op.drop_column("segments", "level")
