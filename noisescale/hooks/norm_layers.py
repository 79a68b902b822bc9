"""The capture of one process without accumulation: per-example gradients at normalization layers.

A normalization layer's weight and bias act on each example alone, so that their per-example gradients
follow from the layer's input and the gradient of its output, with no further pass: with y = x_hat w + b
they are the sums over an example's positions of dL/dy x_hat and of dL/dy. Gray et al. 2024
(arXiv 2411.00999) find that the noise scale of these layers alone predicts that of the whole model up
to a factor near 1. It is a proxy, and is reported as a geometry of its own, "norm_layers".
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import assemble
from noisescale.hooks.options import Options
from noisescale.hooks.stepwise import StepwiseCapture
from noisescale.hooks.uncopied import UncopiedHook

NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

TOLERANCE = 0.01
"""How far, relative to all of them, the examples' gradients may be from adding up to a parameter's:
bfloat16 rounds by 0.004."""

MIXED_EXAMPLES = (
    "the model has BatchNorm layers in training mode, which mix examples, so that no example has a gradient "
    'of its own; accumulate at least 2 micro-batches per step and say samples="micro_batch"'
)

NOT_THEIR_SUM = (
    "noisescale has stopped measuring: the gradients of a normalization layer are not the sum of its "
    "examples' gradients at the layer's output, as with a gradient penalty or a forward() of its own; "
    'accumulate at least 2 micro-batches per step and say samples="micro_batch"'
)


def capture_norm_layers(model: nn.Module, optimizer: Optimizer | None, options: Options) -> StepwiseCapture:
    """Measure a module that one process trains, at its normalization layers.

    Args:
        model: With LayerNorm, RMSNorm or GroupNorm layers whose inputs have the batch first.
        optimizer, options: As of noisescale.attach.

    Raises:
        UnsupportedModelError: It has no such layer with a trained weight, or something is asked for that
            they cannot tell.
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NORM_LAYERS) and trained(layer)]
    if not layers:
        raise UnsupportedModelError(
            "the model has no LayerNorm, RMSNorm or GroupNorm with a trained weight (BatchNorm mixes "
            'examples); accumulate at least 2 micro-batches per step and say samples="micro_batch"'
        )
    mixers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if any(mixer.training for mixer in mixers):
        raise UnsupportedModelError(MIXED_EXAMPLES)
    for name, asked in (
        ("batch_unit", options.batch_unit != "examples"),
        ("loss_reduction", options.loss_reduction == "global_mean"),
        ("groups", options.groups is not None),
        ("geometry", bool(options.other_geometries)),
    ):
        if asked:
            raise UnsupportedModelError(
                f'{name}={getattr(options, name)!r} cannot be had with samples="norm_layers", which takes '
                f"single examples at some layers; leave {name} out"
            )
    built = assemble(
        model, optimizer, options, group=None, sampled_by="norm_layers", carried_means=NOT_THEIR_SUM
    )
    parameters = list({id(p): p for layer in layers for p in trained(layer)}.values())
    squares = NormLayerSquares(layers, mixers=mixers, on_error=built.measuring.fail)
    return StepwiseCapture(
        model, built, options, squares=squares, summed=parameters, carried=lambda: squares.amiss
    )


def trained(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's own parameters that require a gradient."""
    return [parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad]


class NormLayerSquares:
    """The sum, over the examples of a step, of the square norms of their gradients at these layers.

    Args:
        layers: Of NORM_LAYERS.
        mixers: Layers that mix examples while they train; none of them may.
        on_error: Told what went wrong inside a hook; nothing is raised there.

    Attributes:
        cost_s: Host time spent since the step began.
        sampled: None: which parameters have got a gradient is not looked at.
        amiss: After take(): above 0 where the examples' gradients did not add up to a parameter's.
    """

    sampled = None
    amiss: Tensor | None
    _amiss: Tensor | None

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        mixers: Sequence[nn.Module] = (),
        on_error: Callable[[Exception], None],
    ) -> None:
        self._layers = list(layers)
        self._mixers = list(mixers)
        self._parameters = list({id(p): p for layer in layers for p in trained(layer)}.values())
        self._on_error = on_error
        self._handles: list[Any] = []
        self._begin()

    def watch(self, geometry: object = None) -> None:
        """Begin a step: put the hooks on the layers and on their parameters.

        Raises:
            UnsupportedModelError: A layer mixes examples now.
        """
        del geometry  # none is measured at these layers
        if self._handles:
            return
        self._begin()
        if any(mixer.training for mixer in self._mixers):
            raise UnsupportedModelError(MIXED_EXAMPLES)
        for layer in self._layers:
            self._handles.append(layer.register_forward_hook(UncopiedHook(self, "saw"), with_kwargs=True))
        for parameter in self._parameters:
            if not parameter.requires_grad:
                continue  # frozen since attaching
            self._handles.append(parameter.register_hook(self._before(id(parameter))))  # type: ignore[no-untyped-call]  # torch has no types for it
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._after))  # type: ignore[no-untyped-call]  # likewise

    def unwatch(self) -> None:
        """Take the hooks off, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._begin()

    def next_micro_batch(self, count: int) -> None:
        """One is to come, of so many examples."""
        if self._handles:
            self._counts.append(count)

    def take(self, *, micro_batches: int) -> Tensor:
        """The sum of squares, each times its micro-batch's size: by 1 / (M w_k); unwatches."""
        del micro_batches
        total = torch.zeros(1, dtype=torch.float64)
        for (number, _), rows in self._rows.items():
            square = rows.double().square().sum() * self._counts[number]
            total = total.to(square.device, non_blocking=True) + square
        amiss = self._amiss
        self.unwatch()
        self.amiss = amiss
        return total

    def saw(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """One use of a layer in a forward pass."""
        started = time.perf_counter()
        try:
            if self._handles and self._counts and output.requires_grad:
                inputs: Tensor = args[0] if args else kwargs["input"]
                _check_batch_first(layer, inputs, self._counts[-1])
                output.register_hook(self._use(layer, inputs, len(self._counts) - 1))  # type: ignore[no-untyped-call]  # torch has no types for it
        except Exception as error:  # noqa: BLE001  training must go on
            self._on_error(error)
        self.cost_s += time.perf_counter() - started

    def _use(self, layer: nn.Module, inputs: Tensor, number: int) -> Callable[[Tensor], None]:
        """The hook on one output, of the micro-batch with that number."""
        kept, version = inputs.detach(), inputs._version

        def hook(gradient: Tensor) -> None:
            started = time.perf_counter()
            try:
                if kept._version != version:
                    raise UnsupportedModelError(
                        f"the input of a {type(layer).__name__} was changed in place after the layer; "
                        'write it out of place, or measure with samples="micro_batch" and accumulation'
                    )
                self._add(number, _per_example(layer, kept, gradient))
            except Exception as error:  # noqa: BLE001  training must go on
                self._on_error(error)
            self.cost_s += time.perf_counter() - started

        return hook

    def _add(self, number: int, found: Iterable[tuple[int, Tensor]]) -> None:
        """One use's gradients in this backward pass; kept once its parameter accumulates them."""
        task = torch._C._current_graph_task_id()
        for key, rows in found:
            known = self._pending.get(key)
            if known is None or known[0] != task:
                # What torch.autograd.grad() left behind was for no one's step.
                known = self._pending[key] = (task, {})
            before = known[1].get(number)
            known[1][number] = rows if before is None else before + rows

    def _before(self, key: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._gradients[key] = gradient

        torch.utils.hooks.unserializable_hook(hook)  # type: ignore[no-untyped-call]  # a copy is watched by no one
        return hook

    @torch.utils.hooks.unserializable_hook  # type: ignore[untyped-decorator]  # torch has no types for it
    def _after(self, parameter: Tensor) -> None:
        key = id(parameter)
        task, found = self._pending.pop(key, (None, {}))
        gradient = self._gradients.pop(key, None)
        if gradient is None:
            return
        started = time.perf_counter()
        try:
            if task != torch._C._current_graph_task_id():
                found = {}
            self._compare(gradient, found.values())
            for number, rows in found.items():
                before = self._rows.get((number, key))
                # Summed over all uses of the layer, before anything is squared.
                self._rows[number, key] = rows if before is None else before + rows
        except Exception as error:  # noqa: BLE001  training must go on
            self._on_error(error)
        self.cost_s += time.perf_counter() - started

    def _compare(self, gradient: Tensor, found: Iterable[Tensor]) -> None:
        """Whether the examples' gradients add up to the parameter's; read with the step's packet."""
        wide = gradient.detach().double().flatten()
        size, rest = wide.square().sum(), wide.clone()
        for rows in found:
            rest -= rows.double().sum(dim=0)
            size = size + rows.double().square().sum()
        amiss = (rest.square().sum() > TOLERANCE**2 * size).double()
        self._amiss = amiss if self._amiss is None else self._amiss + amiss

    def _begin(self) -> None:
        self.cost_s = 0.0
        self._counts: list[int] = []
        self._pending: dict[int, tuple[int, dict[int, Tensor]]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._amiss = None
        self.amiss = None


def _check_batch_first(layer: nn.Module, inputs: Tensor, count: int) -> None:
    normalized = len(getattr(layer, "normalized_shape", ()))
    if inputs.shape[0] != count or inputs.dim() <= normalized:
        raise UnsupportedModelError(
            f"the input of a {type(layer).__name__} has shape {tuple(inputs.shape)}, and the batch "
            f"of {count} examples is not its first dimension; measure with "
            'samples="micro_batch" and accumulation'
        )


def _per_example(layer: nn.Module, inputs: Tensor, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """By parameter, the gradients of each example: a row of float32 at least each."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    x, g = inputs.to(wide), gradient.to(wide)
    if isinstance(layer, nn.GroupNorm):
        normal = functional.group_norm(x, layer.num_groups, None, None, layer.eps)
        others = tuple(range(2, x.dim()))  # (N, C, *)
    else:
        shape = list(layer.normalized_shape)  # type: ignore[arg-type]  # LayerNorm and RMSNorm have one
        others = tuple(range(1, x.dim() - len(shape)))
        if isinstance(layer, nn.RMSNorm):
            # Its eps=None is that of the input's own dtype.
            eps = layer.eps if layer.eps is not None else torch.finfo(inputs.dtype).eps
            normal = functional.rms_norm(x, shape, None, eps)
        else:
            normal = functional.layer_norm(x, shape, None, None, layer.eps)  # type: ignore[arg-type]  # as above
    for name, value in (("weight", g * normal), ("bias", g)):
        parameter = getattr(layer, name, None)
        if parameter is not None and parameter.requires_grad:
            summed = value.sum(dim=others) if others else value
            yield id(parameter), summed.flatten(1)
