"""x times any typed weight in the type of x: dequantized in slices, each multiplied by the vendor's product.

    y = rounded(sum over k of x[m, k] * w^[n, k] + bias[n]),   w^ = rounded(what dequantize() says)

Both roundings are to the type of x, sums are in float32 (float64 of float64). With u half a unit of that type
and v = 2**-24, y is off by (u + K v / (1 - K v)) * sum |x w| for the weight and the sums, and by u |y| for
itself; on a CPU, whose vendor may round before the bias is added, by that once more. Where float16 does not
carry a weight (`qload.kernels.carries`) all of it is in float32, in slices too.

A slice is what `qload.kernels.slices` says, in memory that the next one takes over: whatever the weight, a
call asks for no more than 256 MiB above y.
"""

from typing import Any

import torch
from torch import Tensor

from qload.kernels import sums
from qload.kernels.carries import carries
from qload.kernels.slices import slices
from qload.spec import Weight


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """x (M, K) -> (M, N) in x's dtype, with gradients of x and bias (N,).

    `factors`: (K,), of the inputs. `narrow`: what inputs and weight are rounded to, if not the dtype of x.
    """
    if not wants_gradients(x, bias):
        return _forward(x, weight, bias, factors, narrow)
    made: Tensor = _Product.apply(x, bias, weight, factors, narrow)  # type: ignore[no-untyped-call]
    return made


def wants_gradients(x: Tensor, bias: Tensor | None) -> bool:
    """Whether somebody wants a gradient of x or a bias."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def in_slices(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    scratch: int | None = None,
    count: int | None = None,
) -> Tensor:
    """x times a weight that its dtype carries, without gradients: y (M, N) in a `dtype`, else that of x.

    `scratch`: bytes of a slice; `count`: how many outputs are wanted, the first.
    """
    N, y = weight.layer.N if count is None else count, None
    for rows, w in slices(weight, x.dtype, factors, scratch):
        here = slice(min(rows.start, N), min(rows.stop, N))
        w, added = w[: here.stop - here.start], None if bias is None else bias[here]
        if here == slice(0, N) and dtype in (None, x.dtype):
            return sums.product(x, w, added)
        y = x.new_empty(x.shape[0], N, dtype=dtype) if y is None else y
        sums.into(y[:, here], x, w, added)
    return x.new_empty(x.shape[0], N, dtype=dtype) if y is None else y


def _forward(
    x: Tensor, weight: Weight, bias: Tensor | None, factors: Tensor | None, narrow: torch.dtype | None
) -> Tensor:
    own = _carried(x, weight, factors, narrow)
    return in_slices(x.to(own), weight, bias, factors, dtype=x.dtype)


def transposed(
    y: Tensor, weight: Weight, factors: Tensor | None = None, narrow: torch.dtype | None = None
) -> Tensor:
    """y (M, N) times the weight (N, K) -> (M, K) in y's dtype: the gradient of x, which has none itself."""
    own = _carried(y, weight, factors, narrow)
    total: Tensor | None = None
    for rows, w in slices(weight, own, factors):
        part = sums.wide(y[:, rows].to(own), w.T)
        total = part if total is None else total.add_(part)
    return y.new_zeros(y.shape[0], weight.layer.K) if total is None else total.to(y.dtype)


def _carried(x: Tensor, weight: Weight, factors: Tensor | None, narrow: torch.dtype | None) -> torch.dtype:
    """What inputs and weight are rounded to."""
    own = narrow or x.dtype
    return own if carries(weight, own, factors) else torch.float32


class _Product(torch.autograd.Function):
    """x times a weight that is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weight: Any) -> Tensor:
        ctx.weight, ctx.bias_type = weight, None if bias is None else bias.dtype
        return _forward(x, weight[0], bias, *weight[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), of_x, of_bias = grads, None, None
        if ctx.needs_input_grad[0]:
            of_x = _Transposed.apply(grad, *ctx.weight)  # type: ignore[no-untyped-call]
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            of_bias = grad.sum(0, dtype=wide).to(ctx.bias_type)
        return of_x, of_bias, *(None for _ in ctx.weight)


class _Transposed(torch.autograd.Function):
    """The gradient of `_Product`, which has one as well."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *weight: Any) -> Tensor:
        ctx.weight = weight
        return transposed(grad, *weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made: Tensor = _Product.apply(grads[0], None, *ctx.weight)  # type: ignore[no-untyped-call]
        return made, *(None for _ in ctx.weight)
