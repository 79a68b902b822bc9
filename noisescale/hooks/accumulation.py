"""The capture of one process alone: its micro-batches are the samples.

Needs gradient accumulation, M >= 2 micro-batches to an optimizer step. The square norm of their sum
is taken as each arrives, before the optimizer steps and before gradients are clipped.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import assemble, trainable
from noisescale.hooks.counting import BatchCounter, count_by
from noisescale.hooks.micro_batches import MicroBatchSquares
from noisescale.hooks.monitor import Monitor
from noisescale.hooks.optimizers import learning_rate_of
from noisescale.hooks.options import Options

PATIENCE_STEPS = 20
"""Optimizer steps of one micro-batch each after which it is said that nothing can be measured."""

NO_ACCUMULATION = (
    f"noisescale has stopped measuring: {PATIENCE_STEPS} optimizer steps had one micro-batch each, and one "
    "sample has no spread; accumulate at least 2 micro-batches per optimizer step, or train on 2 ranks"
)


class AccumulationCapture:
    """Takes the gradients of a plain module, in one process.

    Args:
        model: Any module that is not distributed.
        optimizer, options: As of noisescale.attach.

    Attributes:
        monitor: The noise scale.

    Raises:
        UnsupportedModelError: Nothing in the model can be trained.
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, options: Options) -> None:
        parameters = trainable(model)
        if not parameters:
            raise UnsupportedModelError(
                "no parameter of the model requires a gradient; there is nothing to measure"
            )
        built = assemble(model, optimizer, options, group=None, sampled_by="micro_batch")
        self._options = options
        self._measuring = built.measuring
        self._reporter = built.reporter
        self._counter = BatchCounter()
        self._counted = False
        self._alone = 0
        self._squares = MicroBatchSquares(
            parameters,
            groups=built.groups,
            sampling=built.measuring.sampling,
            on_error=built.measuring.fail,
            watch_sum=True,
        )
        self._handles: list[Any] = [
            model.register_forward_pre_hook(_Call(self, "_before_forward"), with_kwargs=True),
            built.optimizer.register_step_pre_hook(_Call(self, "_before_step")),
            built.optimizer.register_step_post_hook(_Call(self, "_after_step")),
        ]
        self.monitor = Monitor(self, built.reporter, run=built.run, attempt=built.attempt)

    @property
    def passes(self) -> int:
        """Optimizer steps since attaching."""
        return self._measuring.passes

    def collect(self, *, timeout_s: float) -> bool:
        """Read what has been measured and is still on its way."""
        return self._measuring.collect(timeout_s=timeout_s)

    def leave(self) -> None:
        """Stop measuring."""
        self._measuring.leave()

    def detach(self) -> None:
        """Stop measuring and take all hooks off."""
        self.leave()
        self._squares.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or self._measuring.stopped:
            return
        options = self._options
        try:
            counted = count_by(options.count, args, kwargs, batch_unit=options.batch_unit)
        except Exception as error:
            if not self._counted:
                raise  # nothing has been trained yet: the one time when an error does no harm
            self._measuring.fail(error)
            return
        self._counted = True
        self._counter.add(counted, training=module.training)
        if not (module.training or self._counter.only_evaluates):
            return
        if self._measuring.decide():
            self._squares.watch(self._measuring.geometry)
        self._squares.next_micro_batch(counted)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        tally = self._counter.take()
        watched = self._squares.watching
        slot = self._measuring.begin_pass(tally, divisor=1)
        if slot is None or not watched:
            # Not watched although it was to be measured: a step without a forward pass before it.
            self._squares.unwatch()
            return
        try:
            local, summed = self._squares.take(micro_batches=tally.micro_batches)
            slot.local_squares[0], slot.global_squares[0] = local, summed
            scale = getattr(self._options.grad_scaler, "_scale", None)
            if isinstance(scale, Tensor):
                # Still the one of the backward passes; cloned, for the scaler changes it in place.
                slot.unscale = scale.detach().clone().double().square().reciprocal()
        except Exception as error:  # noqa: BLE001  training must go on
            self._measuring.fail(error)
        self._measuring.send(slot)
        self._watch_for_accumulation(tally.micro_batches)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._measuring.note_learning_rate(learning_rate_of(optimizer))
        except Exception as error:  # noqa: BLE001  training must go on
            self._measuring.fail(error)

    def _watch_for_accumulation(self, micro_batches: int) -> None:
        if micro_batches > 1:
            self._alone = -1  # now and then a lone one may be
        elif self._alone >= 0:
            self._alone += 1
            if self._alone == PATIENCE_STEPS:
                self._reporter.refuse(NO_ACCUMULATION)
                self._measuring.leave()


class _Call:
    """A hook that keeps its capture alive, and does nothing on a copied or pickled model."""

    def __init__(self, capture: AccumulationCapture | None, method: str) -> None:
        self._capture = capture
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        if self._capture is not None:
            getattr(self._capture, self._method)(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Call, (None, self._method)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Call":
        return _Call(None, self._method)
