"""`qload::linear`: x times the tensors of any layer, as one node of a traced model.

    qload::linear(x (..., K), tensors of the weight, bias (N,) or none, key of what they mean, N) -> (..., N)

A module calls it where torch traces or records; else it calls what is behind it at once. It has no
gradients, whose bookkeeping costs the host as much as the call; `qload::linear_with_gradients` is the same
with them. The weight is frozen: they are those of x and bias, the former by `qload::linear_gradient`, which
has gradients itself. Where inputs are quantized they pass as if they were not (straight through).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qload.kernels import reference
from qload.kernels.cuda.library import LIBRARY
from qload.kernels.meaning import known

OPERATOR, WITH_GRADIENTS, GRADIENT = "linear", "linear_with_gradients", "linear_gradient"
SCHEMA = "(Tensor x, Tensor[] held, Tensor? bias, str meaning, SymInt N) -> Tensor"
ANYWHERE = "CompositeExplicitAutograd"  # torch's name for: on every device, below its gradients


def _linear(x: Tensor, held: Sequence[Tensor], bias: Tensor | None, meaning: str, N: int) -> Tensor:
    return known(meaning).multiply(x, held, bias)


def _linear_with_gradients(
    x: Tensor, held: Sequence[Tensor], bias: Tensor | None, meaning: str, N: int
) -> Tensor:
    """A tensor that is no view of another, for torch lets nobody write to a view that has gradients here."""
    y = _linear(x, held, bias, meaning, N)
    if y._base is None:
        return y
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def _linear_of_shapes(x: Tensor, held: Sequence[Tensor], bias: Tensor | None, meaning: str, N: int) -> Tensor:
    reference.check(x, known(meaning).typed(held), bias)
    return x.new_empty((*x.shape[:-1], N))


def _gradient(gradient: Tensor, held: Sequence[Tensor], meaning: str, K: int) -> Tensor:
    return known(meaning).gradient(gradient, held)


def _gradient_of_shapes(gradient: Tensor, held: Sequence[Tensor], meaning: str, K: int) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], K))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, held, bias, ctx.meaning, _ = inputs
    ctx.save_for_backward(*held)
    ctx.K, ctx.bias_dtype = x.shape[-1], None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    held = list(ctx.saved_tensors)
    of_x, of_bias = None, None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.qload.linear_gradient(gradient, held, ctx.meaning, ctx.K)
    if ctx.needs_input_grad[2]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=wide).to(ctx.bias_dtype)
    return of_x, [None] * len(held), of_bias, None, None


def _keep_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gradient, held, ctx.meaning, _ = inputs
    ctx.save_for_backward(*held)
    ctx.N = gradient.shape[-1]


def _backward_of_gradient(ctx: Any, second: Tensor) -> tuple[Any, ...]:
    held = list(ctx.saved_tensors)
    plainly = known(ctx.meaning).straight_through
    return (
        torch.ops.qload.linear_with_gradients(second, held, None, plainly, ctx.N),
        [None] * len(held),
        None,
        None,
    )


for _name, _way in ((OPERATOR, _linear), (WITH_GRADIENTS, _linear_with_gradients)):
    LIBRARY.define(_name + SCHEMA)  # type: ignore[no-untyped-call]
    LIBRARY.impl(_name, _way, ANYWHERE)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"qload::{_name}", _linear_of_shapes, lib=LIBRARY)
LIBRARY.impl(OPERATOR, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
torch.library.register_autograd(f"qload::{WITH_GRADIENTS}", _backward, setup_context=_keep, lib=LIBRARY)
LIBRARY.define(f"{GRADIENT}(Tensor gradient, Tensor[] held, str meaning, SymInt K) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl(GRADIENT, _gradient, ANYWHERE)  # type: ignore[no-untyped-call]
torch.library.register_fake(f"qload::{GRADIENT}", _gradient_of_shapes, lib=LIBRARY)
torch.library.register_autograd(
    f"qload::{GRADIENT}", _backward_of_gradient, setup_context=_keep_of_gradient, lib=LIBRARY
)


def linear(x: Tensor, held: Sequence[Tensor], bias: Tensor | None, meaning: str, N: int) -> Tensor:
    """One of the two operators, whose arguments stand above."""
    ways = torch.ops.qload.linear_with_gradients, torch.ops.qload.linear
    y: Tensor = ways[0 if wants_gradients(x, bias) else 1](x, list(held), bias, meaning, N)
    return y


def wants_gradients(x: Tensor, bias: Tensor | None) -> bool:
    """Whether somebody asks for those of x or bias."""
    wanted = x.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and torch.is_grad_enabled()
