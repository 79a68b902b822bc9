"""Hooks that stay behind when the model that they hang on is copied or pickled."""

from typing import Any


class UncopiedHook:
    """Calls a method of its owner, and keeps that alive; a copy of it does nothing.

    Args:
        owner: Whose method; None for one that does nothing.
        method: Its name.
    """

    def __init__(self, owner: object | None, method: str) -> None:
        self._owner = owner
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if self._owner is not None:
            getattr(self._owner, self._method)(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncopiedHook, (None, self._method)

    def __deepcopy__(self, memo: dict[int, Any]) -> "UncopiedHook":
        return UncopiedHook(None, self._method)
