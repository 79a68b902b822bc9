"""The page that documents every setting, from the settings model: docs/settings.md is this page."""

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from noisescale_server.settings import ENV_PREFIX, Settings, is_secret, variable_of

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


def near_misses(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like a misspelled setting, each with the one it may have meant.

    Others that start like ours are no business of the server: the client has some, and Kubernetes makes
    some for a Service of that name.
    """
    known = {variable_of(name) for name in Settings.model_fields}
    known |= {
        f"{variable_of(name)}_FILE" for name, field in Settings.model_fields.items() if is_secret(field)
    }
    found: dict[str, str] = {}
    for variable in environment:
        if variable.startswith(ENV_PREFIX) and variable not in known:
            near = get_close_matches(variable, known, n=1, cutoff=0.9)
            if near:
                found[variable] = near[0]
    return found
