"""A model's forward passes, counted as they come: the same for every capture."""

from typing import Any

import torch
from torch import nn

from noisescale.hooks.counting import BatchCounter, Tally, count_by
from noisescale.hooks.measuring import Measuring
from noisescale.hooks.options import Options


class Forwards:
    """Counts the forward passes that may be trained on.

    Args:
        measuring: Told of an input that cannot be counted, unless it is the first.
        options: How to count.
    """

    def __init__(self, measuring: Measuring, options: Options) -> None:
        self._measuring = measuring
        self._options = options
        self._counter = BatchCounter()
        self._counted = False

    def count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """One is to come: its examples (or tokens), where they are part of the step; else None.

        Raises:
            BatchCountError: The very first one's inputs cannot be counted; or what count= raised.
        """
        if not torch.is_grad_enabled() or self._measuring.stopped:
            return None
        try:
            counted = count_by(self._options.count, args, kwargs, batch_unit=self._options.batch_unit)
        except Exception as error:
            if not self._counted:
                raise  # nothing has been trained yet: the one time when an error does no harm
            self._measuring.fail(error)
            return None
        self._counted = True
        self._counter.add(counted, training=module.training)
        return counted if module.training or self._counter.only_evaluates else None

    def take(self) -> Tally:
        """What there has been since the last take()."""
        return self._counter.take()
