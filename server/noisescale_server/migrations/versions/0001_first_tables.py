"""Runs, attempts and blocks."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "runs",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("info", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_report_at", sa.Double, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("attempt", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=True),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("measured_steps", sa.BigInteger, nullable=False),
        sa.Column("skipped_steps", sa.BigInteger, nullable=False),
        sa.Column("examples", sa.BigInteger, nullable=False),
    )
    op.create_index("runs_last_report_at", "runs", ["last_report_at"])
    op.create_table(
        "attempts",
        sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("first_step", sa.BigInteger, nullable=True),
        sa.Column("last_step", sa.BigInteger, nullable=True),
        sa.Column("dropped_blocks", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "blocks",
        sa.Column("run_id", _ID, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("first_step", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("measured_steps", sa.BigInteger, nullable=False),
        sa.Column("skipped_steps", sa.BigInteger, nullable=False),
        sa.Column("examples", sa.BigInteger, nullable=False),
        sa.Column("superseded", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Remove them, with all they hold."""
    op.drop_table("blocks")
    op.drop_table("attempts")
    op.drop_table("runs")
