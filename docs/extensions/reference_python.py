"""The Python reference: an autodoc directive for every public name of a module."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any


def api(module_name: str) -> Iterator[str]:
    """The names in a module's `__all__`; without one, the public names that it defines itself."""
    module = import_module(module_name)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module_name
    ]
    yield "```{eval-rst}"
    yield from (f".. currentmodule:: {module_name}", "")
    for name in names:
        value = getattr(module, name)
        if directive := _directive(value):
            yield f".. {directive}:: {name}"
            yield from ("   :members:", "   :show-inheritance:", "") if directive != "autofunction" else ("",)
    yield from ("```", "")


def _directive(value: Any) -> str | None:
    if isinstance(value, type):
        return "autoexception" if issubclass(value, BaseException) else "autoclass"
    return "autofunction" if inspect.isroutine(value) else None
