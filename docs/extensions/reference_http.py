"""The HTTP reference, from the server's OpenAPI document."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from noisescale_server import Settings, create_app

Schema = dict[str, Any]


@cache
def document() -> Schema:
    """The OpenAPI document of a server with default settings."""
    return create_app(Settings(database_url="sqlite:///:memory:")).openapi()


def endpoints(_: str) -> Iterator[str]:
    """Every endpoint: what it takes, an example, what it answers."""
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            yield from (f"## {method.upper()} {path}", "", operation.get("description", ""), "")
            yield from _parameters(operation.get("parameters", []))
            yield from _body(operation.get("requestBody"))
            yield from _answers(operation["responses"])


def schemas(_: str) -> Iterator[str]:
    """Every model that an endpoint takes or answers, field by field."""
    for name, schema in sorted(document()["components"]["schemas"].items()):
        if "properties" not in schema:
            continue
        yield from (f"## {name}", "", _prose(schema.get("description", "")), "")
        required = set(schema.get("required", ()))
        notes = _attributes(schema.get("description", ""))
        yield from ("| field | type | default | is |", "|---|---|---|---|")
        for field, kind in schema["properties"].items():
            default = "**required**" if field in required else _default(kind)
            note = kind.get("description") or notes.get(field, "")
            yield f"| `{field}` | {_type(kind)} | {default} | {_cell(note)} |"
        yield ""


def _parameters(parameters: list[Schema]) -> Iterator[str]:
    if not parameters:
        return
    yield from ("| parameter | in | type | default | is |", "|---|---|---|---|---|")
    for one in parameters:
        kind = one["schema"]
        default = "**required**" if one.get("required") else _default(kind)
        note = one.get("description") or kind.get("description", "")
        yield f"| `{one['name']}` | {one['in']} | {_type(kind)} | {default} | {_cell(note)} |"
    yield ""


def _body(body: Schema | None) -> Iterator[str]:
    if body is None:
        return
    content = body["content"]["application/json"]
    yield from (f"The body is a {_type(content['schema'])}, for example:", "")
    example = content.get("example")
    if example is not None:
        yield from ("```json", json.dumps(example, indent=2), "```", "")


def _answers(responses: Schema) -> Iterator[str]:
    yield from ("| status | body | when |", "|---|---|---|")
    for status, answer in sorted(responses.items()):
        bodies = [
            _type(content["schema"]) if content.get("schema", {}).get("type") != "string" else f"`{kind}`"
            for kind, content in answer.get("content", {}).items()
            if content.get("schema")
        ]
        when = answer.get("description", "")
        yield f"| {status} | {' or '.join(bodies)} | {_cell('' if when == 'Successful Response' else when)} |"
    yield ""


def _type(kind: Schema) -> str:
    """A schema in words; a model is a link to its table."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        schema = document()["components"]["schemas"].get(name, {})
        return f"[{name}](#{name.lower()})" if "properties" in schema else _type(schema)
    for key in ("anyOf", "allOf", "oneOf"):
        if key in kind:
            return " or ".join(dict.fromkeys(_type(one) for one in kind[key]))
    if "const" in kind:
        return f"`{json.dumps(kind['const'])}`"
    if "enum" in kind:
        return " ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("type") == "array":
        items = kind.get("items") or {}
        return f"list of {_type(items)}" if items else "list"
    return str(kind.get("type", "any"))


def _default(kind: Schema) -> str:
    return f"`{json.dumps(kind['default'])}`" if "default" in kind else ""


def _prose(description: str) -> str:
    """A docstring without the sections that the table shows."""
    text = description.partition("\nAttributes:")[0].partition("\nRaises:")[0].strip()
    return text.replace("|", "\\|")


def _attributes(description: str) -> dict[str, str]:
    """What a docstring's Attributes section says of each field."""
    section = description.partition("\nAttributes:")[2].partition("\nRaises:")[0]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        head, colon, rest = line.strip().partition(": ")
        if colon and line.startswith("    ") and not line.startswith("     "):
            names = [name.strip() for name in head.split(",")]
            found |= dict.fromkeys(names, rest)
        elif line.strip():
            for name in names:
                found[name] += " " + line.strip()
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
