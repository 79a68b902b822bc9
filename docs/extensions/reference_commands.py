"""The command reference, from the functions that typer makes commands of."""

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from noisescale_client.cli import app as client_app
from noisescale_server.cli import app as server_app

APPS = {"noisescale": client_app, "noisescale-server": server_app}
WORDS = {int: "a whole number", float: "a number", bool: ""}


def commands(program: str) -> Iterator[str]:
    """Every command of a program, those of groups too."""
    for path, command in all_commands(APPS[program], program):
        function = command.callback
        parameters = list(_parameters(function))
        arguments = [
            str(info.metavar or name.upper())
            for name, info, *_ in parameters
            if isinstance(info, ArgumentInfo)
        ]
        yield from (f"## {path}", "", _paragraphs(command.help or inspect.getdoc(function)), "")
        yield from ("    " + " ".join([path, *arguments, "[OPTIONS]"]), "")
        yield from _table(parameters)
        yield from _examples(command.epilog or "")


def all_commands(app: typer.Typer, path: str) -> Iterator[tuple[str, Any]]:
    """Every command of an application with the words that call it."""
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")  # type: ignore[union-attr]
        yield f"{path} {name}", command
    for group in app.registered_groups:
        inner = group.typer_instance
        if inner is not None:
            yield from all_commands(inner, f"{path} {group.name or inner.info.name}")


def _parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, typer's description, type and default of each parameter."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if get_origin(hints[name]) is None or not hasattr(hints[name], "__metadata__"):
            continue  # the context
        kind, *found = get_args(hints[name])
        info = next(one for one in found if isinstance(one, OptionInfo | ArgumentInfo))
        yield name, info, kind, parameter.default


def _table(parameters: list[tuple[str, Any, Any, Any]]) -> Iterator[str]:
    if not parameters:
        return
    yield from ("| argument or option | value | default | is |", "|---|---|---|---|")
    for name, info, kind, default in parameters:
        if isinstance(info, ArgumentInfo):
            yield f"| `{info.metavar or name.upper()}` | {_value(kind)} | **required** | {_cell(info.help)} |"
            continue
        names = ", ".join(f"`{one}`" for one in _option_names(name, info, kind))
        variable = f" Also from the environment variable `{info.envvar}`." if info.envvar else ""
        yield f"| {names} | {_value(kind)} | {_default(info, default)} | {_cell(info.help)}{variable} |"
    yield ""


def _option_names(name: str, info: OptionInfo, kind: Any) -> list[str]:
    """As typer names them: the first that is given stands where a default would, without Annotated."""
    given = [*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or ())]
    if not given:
        long = f"--{name.replace('_', '-')}"
        given = [f"{long}/--no-{long[2:]}" if _plain_type(kind) is bool else long]
    return [one for text in given for one in text.split("/")]


def _plain_type(kind: Any) -> Any:
    """Without the None that an option may be."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(one for one in get_args(kind) if one is not type(None))
    return kind


def _value(kind: Any) -> str:
    kind = _plain_type(kind)
    if get_origin(kind) is Literal:
        return " ".join(f"`{choice}`" for choice in get_args(kind))
    return WORDS.get(kind, "text")


def _default(info: Any, default: Any) -> str:
    if isinstance(info.show_default, str):
        return str(info.show_default)
    return "" if default is None or isinstance(default, bool) else f"`{default}`"


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n"))


def _cell(text: str | None) -> str:
    return _paragraphs(text).replace("|", "\\|")


def _examples(epilog: str) -> Iterator[str]:
    lines = [line.strip() for line in epilog.splitlines() if line.startswith("  ") and line.strip()]
    if lines:
        yield from ("```sh", *lines, "```", "")
