"""Logging: one JSON object a line, with the request's id, and no secrets."""

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import structlog
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from noisescale_server.settings import Settings, is_secret
from noisescale_server.tokens import SECRET_START

_HIDDEN = "[hidden]"
_REPEAT_INPUT = {"ValidationError", "ResponseValidationError", "JSONDecodeError", "UnicodeDecodeError"}
"""Exceptions whose own words hold what they were given: a report, or part of it."""

_SECRET_FORMS = (
    re.compile(rf"{SECRET_START}[A-Za-z0-9_-]{{43}}"),
    re.compile(r"(?i:(?<=bearer )|(?<=basic ))[A-Za-z0-9._~+/=-]+"),
    re.compile(r"(?<=://)[^/\s@\"']+:[^/\s@\"']+(?=@)"),
)
_SHORTEST = 4
"""Shorter secrets are not looked for: they would blot out words everywhere, and hide nothing."""


def configure_logs(settings: Settings) -> None:
    """Send every log, the libraries' too, through structlog to stderr."""
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderers: list[structlog.types.Processor] = (
        [structlog.processors.ExceptionRenderer(_raised), structlog.processors.JSONRenderer()]
        if settings.log_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_raised)]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *renderers,
                _Scrub(_secrets(settings)),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("aiosqlite").setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True


# Without the values of local variables, which may be tokens and whole reports.
_transformed = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)


def _raised(exc_info: structlog.typing.ExcInfo) -> list[dict[str, Any]]:
    """What was raised and where, and its words unless they may repeat what was sent."""
    found = _transformed(exc_info)
    for one in found:
        _hide_input(one)
    return found


def _hide_input(raised: dict[str, Any]) -> None:
    if raised["exc_type"] in _REPEAT_INPUT:
        raised["exc_value"] = _HIDDEN
    for chain in raised["exceptions"]:  # of a group
        for one in chain:
            _hide_input(one)


def _write_raised(output: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    """The same for people, the outermost first."""
    for raised in _raised(exc_info):
        output.write(f"\n{raised['exc_type']}: {raised['exc_value']}")
        for frame in raised["frames"]:
            output.write(f"\n    {frame['filename']}:{frame['lineno']} {frame['name']}")


class _Scrub:
    """The last processor: hides secrets, should one have come into a line after all."""

    def __init__(self, secrets: Sequence[str]) -> None:
        known = sorted((secret for secret in secrets if len(secret) >= _SHORTEST), key=len, reverse=True)
        self._known = re.compile("|".join(re.escape(secret) for secret in known)) if known else None

    def __call__(self, _logger: Any, _method: str, line: Any) -> str:
        """The rendered line without secrets."""
        text = str(line)
        if self._known is not None:
            text = self._known.sub(_HIDDEN, text)
        for form in _SECRET_FORMS:
            text = form.sub(_HIDDEN, text)
        return text


def _secrets(settings: Settings) -> list[str]:
    """Every secret that is set, and every part of one that is a secret by itself."""
    found: list[str] = []
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        if is_secret(field) and isinstance(value, tuple):
            for secret in value:
                if isinstance(secret, SecretStr):
                    text = secret.get_secret_value()
                    found += [text, text.partition("*:")[2]]
    password = make_url(settings.database_url).password
    return [*found, password] if password else found
