"""The tables. Migrations under migrations/versions make them; a test holds the two together."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData()

_Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only INTEGER keys by itself

runs = Table(
    "runs",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("info", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_report_at", Double, nullable=False),
    Column("ended", Boolean, nullable=False),
    # The newest attempt; older ones' late reports do not change info or ended.
    Column("attempt", BigInteger, nullable=False),
    # Goes up with every change of blocks or info, so that caches know themselves stale. Begins with the
    # clock, since SQLite gives a new run the id of one that was purged.
    Column("version", BigInteger, nullable=False),
    # Over the blocks that no later attempt has superseded:
    Column("last_step", BigInteger, nullable=True),
    Column("steps", BigInteger, nullable=False),
    Column("measured_steps", BigInteger, nullable=False),
    Column("skipped_steps", BigInteger, nullable=False),
    Column("examples", BigInteger, nullable=False),
    # The token that reported it first, as noisescale_server.auth names it; null where none was needed.
    Column("token", String(160), nullable=True),
    # Every layer group and geometry that it ever reported: "total/euclidean,encoder/adam".
    Column("groups", Text, nullable=False, server_default=""),
    # The last version whose change was not only that blocks were added behind all others, or at which blocks
    # were merged.
    Column("rewritten", BigInteger, nullable=False, server_default="0"),
    # Blocks that came since retention last looked at the run.
    Column("pending_blocks", BigInteger, nullable=False, server_default="0"),
)
Index("runs_last_report_at", runs.c.last_report_at)
Index("runs_token", runs.c.token)

attempts = Table(
    "attempts",
    metadata,
    Column("run_id", _Id, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("first_step", BigInteger, nullable=True),
    Column("last_step", BigInteger, nullable=True),
    Column("dropped_blocks", BigInteger, nullable=False),
)

# A segment: blocks of one attempt that follow each other without a gap, as one row. So no block can come to
# lie within a segment later, and those that count, the ones not superseded, never overlap.
segments = Table(
    "segments",
    metadata,
    Column("run_id", _Id, ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
    # In step order within a run, so that the tail of a run is one range of the index.
    Column("first_step", BigInteger, primary_key=True, autoincrement=False),
    Column("attempt", BigInteger, primary_key=True, autoincrement=False),
    Column("last_step", BigInteger, nullable=False),
    Column("blocks", Integer, nullable=False),
    # Summed over the blocks:
    Column("measured_steps", BigInteger, nullable=False),
    Column("skipped_steps", BigInteger, nullable=False),
    Column("examples", BigInteger, nullable=False),
    Column("superseded", Boolean, nullable=False),
    Column("body", Text, nullable=False),  # a JSON array of the blocks; see noisescale_server.segments
    # How far retention has merged it; see noisescale_server.merging. 0: as it came.
    Column("level", Integer, nullable=False, server_default="0"),
)

# Tokens that `noisescale-server token create` made. A revoked one stays, so that a server whose last
# token is revoked is shut, not open.
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("scope", String(8), nullable=False),
    Column("prefix", String(128), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=True),
    Column("revoked_at", Double, nullable=True),
)
