"""Everything that can be set, in one place, each by an environment variable NOISESCALE_<NAME>."""

from typing import Annotated, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}


class Settings(BaseSettings):
    """How the server runs. Frozen; checked when built."""

    model_config = SettingsConfigDict(env_prefix="NOISESCALE_", frozen=True, extra="ignore")

    database_url: str = Field(
        default="sqlite:///noisescale.db",
        description="Where reports are kept: sqlite:///PATH (a file, made where there is none) or "
        "postgresql://USER:PASSWORD@HOST/DATABASE.",
    )
    write_tokens: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="Tokens that may send reports, separated by commas; several at once for rotation.",
    )
    read_tokens: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="Tokens that may read runs, metrics and advice, separated by commas. Where there are "
        "none, reading needs no token.",
    )
    grace_s: float = Field(
        default=300.0,
        ge=1,
        description="Seconds after its last report for which a run stays on /metrics. At least two scrapes.",
    )
    window_steps: int = Field(
        default=1000, ge=20, le=100_000, description="Measured steps that an estimate looks back over."
    )
    max_body_bytes: int = Field(
        default=2 * 2**20,
        ge=1024,
        description="Largest request body, in bytes, as sent and after decompression.",
    )
    max_runs: int = Field(default=100_000, ge=1, description="Runs that the database may hold.")
    max_groups: int = Field(
        default=320, ge=1, description="Layer groups times geometries that one block may report."
    )
    ingest_queue_size: int = Field(
        default=2000,
        ge=1,
        description="Reports that may wait for a commit; further ones are answered 503 with Retry-After.",
    )
    commit_size: int = Field(default=256, ge=1, description="Most reports in one commit.")
    max_series_points: int = Field(
        default=2000, ge=10, description="Most points that one answer of a series may have."
    )
    tail_cache_blocks: int = Field(
        default=200_000, ge=1000, description="Blocks of recent steps that are kept in memory, over all runs."
    )
    shutdown_s: float = Field(
        default=20.0, ge=0, description="Seconds that requests in flight get to finish at shutdown."
    )
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_json: bool = Field(
        default=True, description="Log one JSON object a line; otherwise lines for people to read."
    )

    @field_validator("write_tokens", "read_tokens", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError(f"log_level is debug, info, warning or error, got {value!r}")
        return value.lower()

    @field_validator("database_url")
    @classmethod
    def _with_driver(cls, value: str) -> str:
        try:
            url = make_url(value)
        except ArgumentError:
            url = None
        if url is None or url.drivername not in _DRIVERS:
            # The value is not repeated: it may hold a password.
            raise ValueError(
                "database_url must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE"
            )
        return url.set(drivername=_DRIVERS[url.drivername]).render_as_string(hide_password=False)

    @model_validator(mode="after")
    def _readable_where_writable(self) -> Self:
        if self.read_tokens and not self.write_tokens:
            raise ValueError(
                "read_tokens are set and write_tokens are not: then anyone could write; set both, or neither"
            )
        return self

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self.database_url.startswith("sqlite")
