"""The page that documents every setting, from the settings model: docs/settings.md is this page."""

import json
from collections.abc import Iterator

from noisescale_server.settings import Settings, is_secret, variable_of

_HEAD = """\
# Settings

Every setting of `noisescale-server`, by the environment variable that sets it. A secret can be in a file
instead, named by its variable with `_FILE` at the end; setting both is an error. This page is printed by
`noisescale-server settings`; `noisescale-server settings --current` prints what is set now, without secrets.
"""
_HIDDEN = "(hidden)"


def settings_page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *settings_table()]) + "\n"


def settings_table() -> Iterator[str]:
    """The lines of one Markdown table with every setting."""
    yield from ("| variable | default | is |", "|---|---|---|")
    for name, field in Settings.model_fields.items():
        default = "" if field.default in ((), None) else f"`{json.dumps(field.default).strip(chr(34))}`"
        description = (field.description or "").replace("|", "\\|")
        if is_secret(field):
            description += f" A secret: also as `{variable_of(name)}_FILE`."
        yield f"| `{variable_of(name)}` | {default} | {description} |"


def current(settings: Settings) -> dict[str, object]:
    """What each variable is set to, secrets hidden; a secret that is not set shows as it is."""
    return {
        variable_of(name): _HIDDEN
        if is_secret(field) and getattr(settings, name) != field.default
        else getattr(settings, name)
        for name, field in Settings.model_fields.items()
    }
