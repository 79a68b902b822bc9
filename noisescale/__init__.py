"""Measure the gradient noise scale of a data-parallel run, and learn whether its batch and rate are right.

monitor = noisescale.attach(model, optimizer, report_to="http://localhost:8000")
"""

from typing import TYPE_CHECKING, Any

from noisescale.errors import NoiseScaleError
from noisescale.estimate import Estimate

if TYPE_CHECKING:
    from noisescale.hooks.attach import attach
    from noisescale.hooks.monitor import Monitor

__all__ = ["Estimate", "Monitor", "NoiseScaleError", "attach"]

_NEED_TORCH = {"attach": "noisescale.hooks.attach", "Monitor": "noisescale.hooks.monitor"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'noisescale' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(_NEED_TORCH[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"noisescale.{name} needs torch, which is not installed; pip install 'noisescale[torch]'"
        ) from error
    return getattr(module, name)
