"""Square norms of micro-batches' gradients, by hooks on the parameters, before they are accumulated.

The hooks are there in measured steps only, so the others cost nothing. They see a gradient under
no_sync() too, in compiled models, and once for a weight that is used twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.geometry.halves import half_sign
from noisescale.hooks.geometry.sampled import GeometryStep
from noisescale.hooks.groups import LayerGroups
from noisescale.hooks.norms import square_norm
from noisescale.hooks.sampling import Sampling


class MicroBatchSquares:
    """One rank's sum, over the micro-batches of a step, of their gradients' square norms.

    Args:
        parameters: Whose gradients to take; those that require one.
        groups: Layer groups.
        sampling: How micro-batches are weighed.
        on_error: Told what went wrong inside a hook; nothing is raised there.
        rank: Of this process, for which half of the samples its micro-batches are in.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        groups: LayerGroups,
        sampling: Sampling,
        on_error: Callable[[Exception], None],
        rank: int = 0,
    ) -> None:
        self._parameters = list(parameters)
        self._groups = groups
        self._on_error = on_error
        self._rank = rank
        self._handles: list[Any] = []
        self._sampling = sampling
        self._geometry: GeometryStep | None = None
        self._begin()

    @property
    def watching(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._handles)

    def watch(self, geometry: GeometryStep | None = None) -> None:
        """Begin a step: put the hooks on the parameters.

        Args:
            geometry: Gathers the same samples for other geometries.
        """
        if not self._handles:
            self._begin()
            self._geometry = geometry
            for index, parameter in enumerate(self._parameters):
                self._handles.append(parameter.register_hook(self._before(index)))  # type: ignore[no-untyped-call]  # torch has no types for it
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._after(index)))  # type: ignore[no-untyped-call]  # likewise

    def next_micro_batch(self, count: int) -> None:
        """One is to come, of so many examples (or tokens)."""
        if self._handles and count > 0:
            self._factor = self._sampling.micro_batch_factor(count)
            self._half = half_sign(rank=self._rank, micro_batch=len(self._samples))
            self._samples.append((self._half, count))

    def unwatch(self) -> None:
        """Take the hooks off, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin()

    def take(self, *, micro_batches: int) -> Tensor:
        """By layer group: the sum of the micro-batches' squares; unwatches.

        Args:
            micro_batches: How many there were.

        Raises:
            UnsupportedModelError: A parameter got its gradient in more than one piece per micro-batch.
        """
        times = max(self._times, default=0)
        if self._geometry is not None and self._samples:
            for half, count in self._samples:
                weight = self._sampling.raw_weight(count, micro_batches=micro_batches)
                self._geometry.end_sample(half=half, raw_weight=weight, count=count)
        seen = [index for index, square in enumerate(self._squares) if square is not None]
        squares = [square for square in self._squares if square is not None]
        parameters = [self._parameters[index] for index in seen]
        self.unwatch()
        if times > micro_batches:
            raise UnsupportedModelError(
                f"a parameter got {times} gradients in {micro_batches} micro-batch(es): reentrant activation "
                "checkpointing of a weight that is used twice does that, and a backward() for each of "
                "several losses; use checkpoint(..., use_reentrant=False) and one backward() per "
                'micro-batch, or attach with samples="rank"'
            )
        return self._groups.sums(squares, parameters)

    def _begin(self) -> None:
        count = len(self._parameters)
        self._pending: list[tuple[Tensor, Tensor] | None] = [None] * count
        self._squares: list[Tensor | None] = [None] * count
        self._times = [0] * count
        self._factor = 1.0
        self._half = 1
        self._samples: list[tuple[int, int]] = []
        self._geometry = None

    def _before(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # Not counted yet: torch.autograd.grad() calls this too, and accumulates nothing.
            try:
                self._pending[index] = (square_norm(gradient), gradient)
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook

    def _after(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            pending, self._pending[index] = self._pending[index], None
            if pending is None:
                return
            square, gradient = pending
            try:
                if self._geometry is not None:
                    self._geometry.add(index, gradient, half=self._half, factor=self._factor)
                weighed = square if self._factor == 1.0 else square * self._factor
                before = self._squares[index]
                self._squares[index] = weighed if before is None else before + weighed
                self._times[index] += 1
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook
