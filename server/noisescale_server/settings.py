"""Everything that can be set, in one place, each by an environment variable NOISESCALE_<NAME>.

A secret can also be read from a file that NOISESCALE_<NAME>_FILE names, as container and systemd secrets are
handed over.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from noisescale_server.errors import StartError

ENV_PREFIX = "NOISESCALE_"
_SECRET: dict[str, Any] = {"secret": True}
_TOKENS_FORM = (
    "separated by commas or lines; `PREFIX*:TOKEN` is limited to runs whose names start with PREFIX"
)

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}


class Settings(BaseSettings):
    """How the server runs. Frozen; checked when built."""

    # Of a wrong value only the rule is told, never the value: it may be a secret.
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True
    )

    database_url: str = Field(
        default="sqlite:///noisescale.db",
        repr=False,
        json_schema_extra=_SECRET,
        description="Where reports are kept: sqlite:///PATH (a file, made where there is none) or "
        "postgresql://USER:PASSWORD@HOST/DATABASE.",
    )
    write_tokens: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        json_schema_extra=_SECRET,
        description=f"Tokens that may send reports, and read; {_TOKENS_FORM}. Several at once for rotation.",
    )
    read_tokens: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        json_schema_extra=_SECRET,
        description=f"Tokens that may read runs, metrics and advice; {_TOKENS_FORM}.",
    )
    admin_tokens: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        json_schema_extra=_SECRET,
        description=f"Tokens that may do everything, making and revoking tokens too; {_TOKENS_FORM}.",
    )
    open_reading: bool = Field(
        default=False,
        description="Whether everybody may read without a token although there are tokens.",
    )
    grace_s: float = Field(
        default=300.0,
        ge=1,
        description="Seconds after its last report for which a run stays on /metrics. At least two scrapes.",
    )
    retention_days: float = Field(
        default=365.0,
        ge=0,
        description="Days without a report after which a run is removed, with all that was reported on it. "
        "0: never.",
    )
    window_steps: int = Field(
        default=1000, ge=20, le=100_000, description="Measured steps that an estimate looks back over."
    )
    max_body_bytes: int = Field(
        default=2 * 2**20,
        ge=1024,
        description="Largest request body, in bytes, as sent and after decompression.",
    )
    body_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a request's body may take to come in; then 408."
    )
    max_runs: int = Field(default=100_000, ge=1, description="Runs that the database may hold.")
    max_runs_per_token: int = Field(
        default=20_000,
        ge=1,
        description="Runs that the database may hold of one token: those that were first reported with it. "
        "All tokens of one scope and prefix that are set by variable count as one.",
    )
    max_requests_per_s: float = Field(
        default=2000.0,
        ge=0,
        description="Requests that one token, or one address without a token, may make in a second at each "
        "process, and twice as many at once; further ones are answered 429 with Retry-After. 0: any number.",
    )
    max_groups: int = Field(
        default=320, ge=1, description="Layer groups times geometries that one run may report."
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

    @field_validator("write_tokens", "read_tokens", "admin_tokens", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in re.split(r"[,\n]", value) if part.strip())
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

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self.database_url.startswith("sqlite")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then files, then the environment; no setting is read from two of the latter."""
        del dotenv_settings, file_secret_settings
        return init_settings, _SecretFiles(settings_cls), env_settings


def load_settings() -> Settings:
    """The settings of this process's environment.

    Raises:
        StartError: One of them cannot be; names the variable, never repeats the value.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "_".join(str(part) for part in first["loc"] if isinstance(part, str))
        message = first["msg"].removeprefix("Value error, ")
        raise StartError(f"{variable_of(name)}: {message}" if name else message) from None


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting is never shown, and can be read from a file."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("secret"))


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{ENV_PREFIX}{name.upper()}"


class _SecretFiles(PydanticBaseSettingsSource):
    """Reads the secrets that NOISESCALE_<NAME>_FILE variables name files for."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One setting's text; None where it has no file.

        Raises:
            StartError: The file cannot be read, or is empty, or the setting is given in both ways.
        """
        variable = variable_of(field_name)
        file_variable = f"{variable}_FILE"
        path = os.environ.get(file_variable)
        if not path or not is_secret(field):
            return None, field_name, False
        if os.environ.get(variable):
            raise StartError(f"{variable} and {file_variable} are both set; leave one of them out")
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartError(f"{file_variable}: {path} cannot be read: {reason}") from None
        if not text:
            # An empty secret would mean "no tokens", and let everybody in.
            raise StartError(
                f"{file_variable}: {path} is empty; write the secret into it, or unset {file_variable}"
            )
        return text, field_name, False

    def __call__(self) -> dict[str, Any]:
        """The settings that have files."""
        found = {
            name: self.get_field_value(field, name)[0]
            for name, field in self.settings_cls.model_fields.items()
        }
        return {name: text for name, text in found.items() if text is not None}
