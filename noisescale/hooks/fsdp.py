"""The capture of models sharded by fully_shard (FSDP2), HSDP too.

Every micro-batch of every rank is a sample. A rank's own gradients are taken in backward, by hooks on
the unsharded parameters, before FSDP reduces them: so they are whole, in the compute dtype, and not yet
divided, whatever the reduction's dtype and whether it happens in this micro-batch or later. What the
optimizer gets is taken from the shards; the ranks' parts are added up in the packet, and divided by
the number of ranks that hold the same shard.

With CPU offloading, FSDP waits for the copy of the gradients in measured steps, as it does for any hook
that reads them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from noisescale.errors import UnsupportedModelError
from noisescale.hooks.assembly import assemble
from noisescale.hooks.micro_batches import MicroBatchSquares
from noisescale.hooks.options import Options
from noisescale.hooks.stepwise import StepwiseCapture, group_of_ranks


@dataclass(frozen=True, slots=True)
class _Mesh:
    """What the model is sharded over.

    Attributes:
        replicas: Ranks that hold the same shard.
        device: Where the model computes; its shards may be elsewhere.
    """

    ranks: tuple[int, ...]
    replicas: int
    device: torch.device


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard was applied to the model or a part of it."""
    return any(True for _ in _sharded_modules(model))


def capture_sharded(model: nn.Module, optimizer: Optimizer | None, options: Options) -> StepwiseCapture:
    """Measure a model that fully_shard was applied to; every rank of its mesh calls it.

    Unshards one module after another, once, as the first forward pass does. Not to be called between a
    forward and its backward pass.

    Args:
        model: The root module.
        optimizer, options: As of noisescale.attach.

    Raises:
        UnsupportedModelError: Nothing can be trained, a part has no memory yet or is not sharded, parts
            are sharded over different meshes or over other dimensions than data-parallel ones, or
            geometries other than the Euclidean are wanted.
        OptimizerNotFoundError, InvalidInputError: As noisescale.attach.
    """
    if options.other_geometries:
        raise UnsupportedModelError(
            f"geometry={options.geometry!r} needs whole gradients in one place, and this model's are "
            'sharded; measure geometry="euclidean", or the others on a DistributedDataParallel run'
        )
    mesh = _mesh_of(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnsupportedModelError(
            "the model's parameters are on the meta device, without memory; attach after "
            "model.to_empty(device=...) and their initialisation, or the loading of a checkpoint"
        )
    pairs = _unsharded_and_sharded(model)
    if not pairs:
        raise UnsupportedModelError(
            "no parameter of the model requires a gradient; there is nothing to measure"
        )
    _check_all_sharded(model, [sharded for _, sharded in pairs])
    built = assemble(
        model,
        optimizer,
        options,
        group=group_of_ranks(mesh.ranks),
        sampled_by="micro_batch",
        sharded=True,
        device=mesh.device,
    )
    whole, shards = [unsharded for unsharded, _ in pairs], [sharded for _, sharded in pairs]
    squares = MicroBatchSquares(
        whole,
        groups=built.groups.named_like(shards, whole),
        sampling=built.measuring.sampling,
        on_error=built.measuring.fail,
        rank=built.measuring.rank,
    )
    return StepwiseCapture(model, built, options, squares=squares, summed=shards, replicas=mesh.replicas)


def _sharded_modules(model: nn.Module) -> Iterator[Any]:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before torch 2.6
        return
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def _mesh_of(model: nn.Module) -> _Mesh:
    found: set[_Mesh] = set()
    for module in _sharded_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if group.gradient_divide_factor is not None:
                raise UnsupportedModelError(
                    "set_gradient_divide_factor() makes the reduced gradient another thing than the mean "
                    "over ranks, which is what the noise scale is measured from; leave it out"
                )
            mesh = group.mesh_info.mesh
            replicas = 1
            if group.mesh_info.replicate_mesh_dim is not None:
                replicas = mesh.size(group.mesh_info.replicate_mesh_dim)
            for parameter in group.fsdp_params:
                own = parameter.sharded_param.device_mesh
                if own.ndim != mesh.ndim:
                    raise UnsupportedModelError(
                        f"a parameter is distributed over {own.ndim} mesh dimensions, of which {mesh.ndim} "
                        "are data-parallel (tensor parallelism?); only data-parallel meshes are measured"
                    )
            found.add(_Mesh(tuple(sorted(mesh.mesh.flatten().tolist())), replicas, group.device))
    if len(found) != 1:
        raise UnsupportedModelError(
            f"the model's parts are sharded over {len(found)} different meshes; shard all of them over one"
        )
    (mesh,) = found
    if dist.get_rank() not in mesh.ranks:
        raise UnsupportedModelError("this rank is not in the mesh that the model is sharded over")
    return mesh


def _unsharded_and_sharded(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Each trained parameter as backward sees it and as the optimizer does.

    The unsharded one is the same object in every step; only its memory comes and goes.
    """
    for module in _sharded_modules(model):
        module.reshard()  # the root stays unsharded after a forward pass
    # By shard, for a weight may be in several modules.
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for module in _sharded_modules(model):
        sharded = dict(module.named_parameters())
        module.unshard()
        try:
            whole = dict(module.named_parameters())
            for name, parameter in sharded.items():
                if whole[name] is not parameter and parameter.requires_grad:
                    found[id(parameter)] = (whole[name], parameter)
        finally:
            module.reshard()
    return list(found.values())


def _check_all_sharded(model: nn.Module, sharded: list[Tensor]) -> None:
    known = {id(parameter) for parameter in sharded}
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if left:
        raise UnsupportedModelError(
            f"{len(left)} parameters are not sharded ({', '.join(left[:3])}), and nothing reduces their "
            "gradients; apply fully_shard to the root module too"
        )
