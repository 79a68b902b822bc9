"""A user's own DDP comm hook, run inside ours: what may be one, and what it does to the measurement."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]  # left out of its stubs

from noisescale.errors import UnsupportedModelError

HookFunction = Callable[[Any, GradBucket], Any]
InnerHook = HookFunction | tuple[Any, HookFunction]

_DO_NOT_AVERAGE = {
    "powerSGD_hook": "its low-rank gradients have another square norm, 43% less at rank 1",
    "batched_powerSGD_hook": "its low-rank gradients have another square norm",
    "quantization_pertensor_hook": "it rounds gradients to 8 bits",
    "quantization_perchannel_hook": "it rounds gradients to 8 bits",
    "noop_hook": "it does not average over the ranks",
    "post_localSGD_hook": "it does not average over all ranks",
}

_ROUND = (
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16_compress_wrapper_hook",
    "bf16_compress_wrapper_hook",
)


@dataclass(frozen=True, slots=True)
class Inner:
    """A comm hook with its state.

    Attributes:
        rounds: Whether it reduces in half precision, which moves |gbar|^2 by parts in 10^5 (fp16)
            or 10^3 (bf16).
    """

    hook: HookFunction
    state: Any
    name: str
    rounds: bool

    def start(self, bucket: GradBucket) -> Any:
        """Run it on one bucket; answers its future.

        Raises:
            UnsupportedModelError: It returned no future. Let through, None would crash the
                interpreter, and a tensor fail far from here.
        """
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise UnsupportedModelError(
                f"inner_hook {self.name} returned {type(future).__name__}; a DDP comm hook must return a "
                "torch.futures.Future that holds the bucket's reduced tensor"
            )
        return future


def inner_of(given: InnerHook | None, *, group: ProcessGroup) -> Inner | None:
    """Check a user's inner hook.

    Args:
        given: A hook, which gets the model's process group as its state, as torch's default hooks
            expect; or (state, hook), in the order of register_comm_hook.

    Raises:
        UnsupportedModelError: It is no hook, or is known not to average over all ranks.
    """
    if given is None:
        return None
    state, hook = given if isinstance(given, tuple) else (group, given)
    if not callable(hook):
        raise UnsupportedModelError(
            f"inner_hook must be a hook or (state, hook), as for register_comm_hook, got {given!r}"
        )
    names = [function.__name__ for function in _functions(hook) if hasattr(function, "__name__")]
    for name in names:
        if name in _DO_NOT_AVERAGE:
            raise UnsupportedModelError(
                f"the noise scale cannot be measured with inner_hook {name}: {_DO_NOT_AVERAGE[name]}; "
                "measure with DDP's own all-reduce or torch's fp16_compress_hook, and go back to it later"
            )
    return Inner(
        hook=hook,
        state=state,
        name=names[0] if names else type(hook).__name__,
        rounds=any(name in _ROUND for name in names),
    )


def reduced_tensor(future: Any) -> Tensor:
    """The reduced bucket of a completed future, which holds a tensor or a list of one."""
    value = future.value()
    tensor: Tensor = value[0] if isinstance(value, list | tuple) else value
    return tensor


def _functions(hook: Any, *, depth: int = 4) -> Iterator[Any]:
    """A hook, and the functions it is wrapped around."""
    yield hook
    if depth == 0:
        return
    inside = [hook.func, *hook.args] if isinstance(hook, functools.partial) else []
    inside += [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    for function in inside:
        if callable(function):
            yield from _functions(function, depth=depth - 1)
