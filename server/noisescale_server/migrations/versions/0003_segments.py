"""Blocks that follow each other become one row; what retention has merged is known of each run."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the table of segments, and each block a segment of its own; retention joins them later."""
    op.create_table(
        "segments",
        sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("first_step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("blocks", sa.Integer, nullable=False),
        sa.Column("measured_steps", sa.BigInteger, nullable=False),
        sa.Column("skipped_steps", sa.BigInteger, nullable=False),
        sa.Column("examples", sa.BigInteger, nullable=False),
        sa.Column("superseded", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.execute(
        "INSERT INTO segments SELECT run_id, first_step, attempt, last_step, 1, measured_steps, "
        "skipped_steps, examples, superseded, '[' || body || ']' FROM blocks"
    )
    op.drop_table("blocks")
    for name in ("rewritten", "merged_until", "merged_measured_steps"):
        op.add_column("runs", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    """Refuse: one row of many blocks cannot be parted in SQL."""
    raise NotImplementedError("restore the backup that was made before the upgrade to schema 0003")
