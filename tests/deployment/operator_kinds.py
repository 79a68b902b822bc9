"""Holds manifests against the Prometheus operator's kinds, out of a wheel made from its CRDs; run by lint.py.

python operator_kinds.py FILE    # a JSON list of manifests
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError


def faults(manifest: dict[str, Any]) -> Iterator[str]:
    """What is wrong with one manifest; a field that the kind does not have is a fault too."""
    version, kind = manifest["apiVersion"].rpartition("/")[2], manifest["kind"]
    model = getattr(import_module(f"cloudcoil.models.prometheus_operator.{version}"), kind)
    try:
        read = model.model_validate(manifest)
    except ValidationError as error:
        for found in error.errors():
            yield f"{kind}: {'.'.join(map(str, found['loc']))}: {found['msg']}"
        return
    kept = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    yield from (f"{kind}: there is no field {path}" for path in lost(manifest, kept, ""))


def lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Fields of `given` that are not in `kept`."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}"
            else:
                yield from lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from lost(value, kept[index], f"{path}[{index}]")


if __name__ == "__main__":
    found = [fault for manifest in json.loads(Path(sys.argv[1]).read_text()) for fault in faults(manifest)]
    sys.exit("\n".join(found) or 0)
