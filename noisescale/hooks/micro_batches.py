"""Square norms of micro-batches' gradients, by hooks on the parameters, before they are accumulated.

The hooks are there in measured steps only, so the others cost nothing. They see a gradient under
no_sync() too, in compiled models, and once for a weight that is used twice.
"""

import logging
import time
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

_log = logging.getLogger(__name__)


class MicroBatchSquares:
    """One rank's sum, over the micro-batches of a step, of their gradients' square norms.

    Args:
        parameters: Whose gradients to take; those that require one.
        groups: Layer groups.
        sampling: How micro-batches are weighed.
        on_error: Told what went wrong inside a hook; nothing is raised there.
        rank: Of this process, for which half of the samples its micro-batches are in.

    Attributes:
        cost_s: Host time spent since the step began.
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
        self._said_fewer = False
        self._begin()

    @property
    def watching(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._handles)

    @property
    def sampled(self) -> frozenset[int]:
        """Numbers of the parameters that have got a gradient in this step."""
        return frozenset(index for index, square in enumerate(self._squares) if square is not None)

    def watch(self, geometry: GeometryStep | None = None) -> None:
        """Begin a step: put the hooks on the parameters.

        Args:
            geometry: Gathers the same samples for other geometries.
        """
        if not self._handles:
            self._begin()
            self._geometry = geometry
            for index, parameter in enumerate(self._parameters):
                if not parameter.requires_grad:
                    continue  # frozen since attaching
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

        Returns:
            NaN, so that the step is skipped on all ranks, where some forward passes were followed by no
            backward pass: it is not known which examples the gradients are of.

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
        sums = self._groups.sums(squares, parameters)
        if times < micro_batches:
            self._say_fewer(times, micro_batches)
            return torch.full_like(sums, torch.nan)
        return sums

    def _say_fewer(self, times: int, micro_batches: int) -> None:
        if not self._said_fewer:
            self._said_fewer = True
            _log.warning(
                "noisescale skips a step of %d forward passes and %d backward pass(es): which examples the "
                "gradients are of is not known. Run forward passes that are not trained on under "
                "torch.no_grad(); losses of several forward passes are measured under "
                'DistributedDataParallel with samples="rank" (said once)',
                micro_batches,
                times,
            )

    def _begin(self) -> None:
        count = len(self._parameters)
        self.cost_s = 0.0
        self._pending: list[tuple[Tensor, Tensor | None] | None] = [None] * count
        self._squares: list[Tensor | None] = [None] * count
        self._times = [0] * count
        self._factor = 1.0
        self._half = 1
        self._samples: list[tuple[int, int]] = []
        self._geometry = None

    def _before(self, index: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            # Not counted yet: torch.autograd.grad() calls this too, and accumulates nothing.
            started = time.perf_counter()
            try:
                # Kept only where it is needed: autograd copies a gradient that someone else holds.
                kept = gradient if self._geometry is not None else None
                self._pending[index] = (square_norm(gradient), kept)
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)
            self.cost_s += time.perf_counter() - started

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook

    def _after(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            pending, self._pending[index] = self._pending[index], None
            if pending is None:
                return
            square, gradient = pending
            started = time.perf_counter()
            try:
                if self._geometry is not None and gradient is not None:
                    self._geometry.add(index, gradient, half=self._half, factor=self._factor)
                weighed = square if self._factor == 1.0 else square * self._factor
                before = self._squares[index]
                self._squares[index] = weighed if before is None else before + weighed
                self._times[index] += 1
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)
            self.cost_s += time.perf_counter() - started

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook
