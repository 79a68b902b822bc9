"""`noisescale-server settings`: what can be set, and what is."""

from typing import Annotated

import typer

from noisescale_server.settings import load_settings
from noisescale_server.settings_page import current, settings_page

EXAMPLES = (
    "Examples:\n\n  noisescale-server settings > docs/settings.md\n\n  noisescale-server settings --current"
)


def settings(
    now: Annotated[
        bool, typer.Option("--current", help="Print what is set now, without the secrets.")
    ] = False,
) -> None:
    """Print every setting with its default and what it does, as Markdown."""
    if now:
        for variable, value in current(load_settings()).items():
            typer.echo(f"{variable}={value}")
    else:
        typer.echo(settings_page(), nl=False)
