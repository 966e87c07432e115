"""One student over several processes: each holds it whole (ddp), or a share of every decoder layer (fsdp2).

Gradients are *summed* over processes: each part of the loss is divided by the scored tokens of the whole optimizer step
before (objectives.md, rule 1), so a mean over processes would be wrong by their number. With ddp they are summed once a
step, after all micro-batches: they gather at the rounded weights and reach the master weights once, so there is nothing
that torch's own wrapper could send earlier. With fsdp2 (torch's fully_shard) weights, gradients, optimizer and average
are cut along the rows of each weight; a layer is whole only while it computes. Embedding, head, norm of the last layer,
position table and the teacher are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from reflux.components import processes
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.algorithms.rollouts import Engine, Request, Rollout

Asked = ParamSpec("Asked")
Result = TypeVar("Result")

BUCKET_VALUES = 8 << 20
"""Gradients sent at once, 32 MB of float32: few messages, and no second copy of all of them."""


def shard(student: Any) -> None:
    """Cut every decoder layer into as many shares as there are processes, in place."""
    body, layers = student.model, decoder_layers(student)
    mesh = init_device_mesh(next(body.parameters()).device.type, (processes.count(),))
    for layer in layers:
        cut_layer = fully_shard(layer, mesh=mesh)
        cut_layer.set_gradient_divide_factor(1.0)
        cut_layer.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing while it sums
    cut = {id(p) for p in layers.parameters()}
    fully_shard(body, mesh=mesh, ignored_params={p for p in body.parameters() if id(p) not in cut})


def is_sharded(student: Any) -> bool:
    return isinstance(student.model, FSDPModule)


@contextmanager
def whole(student: Any) -> Iterator[None]:
    """Within the block every process holds all weights, so that each may go forward as often as it likes."""
    layers = [layer for layer in decoder_layers(student) if isinstance(layer, FSDPModule)]
    for layer in layers:
        layer.set_reshard_after_forward(False)
        layer.unshard()
    try:
        yield
    finally:
        for layer in layers:
            layer.set_reshard_after_forward(True)
            layer.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; shares its memory."""
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held


def like(value: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """A tensor of this process as its share of one that is cut like `pattern`."""
    if not isinstance(pattern, DTensor):
        return value
    return DTensor.from_local(
        value, pattern.device_mesh, pattern.placements, shape=pattern.shape, stride=pattern.stride()
    )


def cut_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state as this process kept it, cut like the parameters that it belongs to."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        index: {name: like(value, parameters[index]) if value.ndim else value for name, value in of_one.items()}
        for index, of_one in state["state"].items()
    }
    return {**state, "state": moments}


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum over processes the gradients of parameters that each process holds whole; fully_shard sums the others."""
    if processes.count() == 1:
        return
    bucket: list[torch.Tensor] = []
    for p in parameters:
        if p.grad is None or isinstance(p.grad, DTensor):
            continue
        bucket.append(p.grad)
        if sum(grad.numel() for grad in bucket) >= BUCKET_VALUES:
            _sum(bucket)
            bucket = []
    if bucket:
        _sum(bucket)


def _sum(grads: list[torch.Tensor]) -> None:
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def clip_gradients(parameters: Iterable[torch.nn.Parameter], largest: float) -> float:
    """Scale gradients down to norm `largest` together; returns the norm before, the same at every process."""
    grads = [p.grad for p in parameters if p.grad is not None]
    cut = [local(grad) for grad in grads if isinstance(grad, DTensor)]
    held = [grad for grad in grads if not isinstance(grad, DTensor)]
    squares = torch.nn.utils.get_total_norm(cut).square() if cut else torch.zeros(())
    if cut:
        dist.all_reduce(squares)
    norm = torch.nn.utils.get_total_norm(held)
    if cut:
        norm = (squares + norm.square()).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for grad in [*cut, *held]:
        grad.mul_(factor)
    return norm.item()


def dealt(engine: Engine) -> Engine:
    """An engine that leaves to each process its share of the requests, and has all answers at all of them. An error in
    one process, which would wait for the others for ever, is one in all.
    """

    def answer(requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        own, failure = list[Rollout](), ""
        try:
            own = engine(processes.share(requests), sampling)
        except FloatingPointError as error:
            failure = str(error)
        if failures := [message for message in processes.gathered(failure) if message]:
            raise FloatingPointError(failures[0])
        return processes.joined_shares(own)

    return answer if processes.count() > 1 else engine


def by_whole(student: Any, function: Callable[Asked, Result]) -> Callable[Asked, Result]:
    """The function, with all of the student at hand in every process while it is called."""

    def called(*args: Asked.args, **kwargs: Asked.kwargs) -> Result:
        with whole(student):
            return function(*args, **kwargs)

    return called
