"""What the experts that tokens chose make of them: by native kernels where they fit, else in plain torch.

In this order, each step in float32 (float64 for x of float64):

1. x, and where the routing weight goes on the input its product with that weight;
2. gate and up by one product, plus their bias; the activation; down, plus its bias. What goes into gate and
   up, and into down, is quantized before, where the expert declares it, by its own stored scales;
3. where the routing weight goes on the output, its product with that weight;
4. the sum over the experts of a token, in the order of their numbers, whatever the order of its ids.

One rounding follows, to the dtype of x. A weight is what its `dequantize()` says, and sums are in float32. On
a GPU both sides of a product are rounded to the dtype of x as well. On a CPU so are, for x of bfloat16 that
wants no gradient, inputs that no declaration quantizes, and weights may be; what comes out of a product stays
float32.

All tokens that chose an expert go through it at once, and experts that no token chose are not read. How many
tokens an expert has decides in which order a kernel, or the vendor, sums a row: what a token gets depends on
its batch within the bound of those sums, and by nothing else. A scale that is found over all tokens would: it
is refused.

Llama 4's routing weight is part of the input that is quantized, not of the product. Its owner multiplies the
hidden states by it, and hands these to the experts, whose linear layers quantize what they get:
`Llama4TextMoe.forward` of transformers 5.23.0, as vLLM does where the router's weight goes on the input.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError, DtypeError, ShapeError, check_type
from qload.kernels import cuda, declared
from qload.kernels.declared import REMEDY, Activations, Maximum
from qload.kernels.experts_on_device import DeviceExperts, is_capturing
from qload.kernels.experts_products import ExpertProducts, KeptExperts
from qload.kernels.reference import WIDE
from qload.kernels.routed import RoutedTokens, routed

IDS = (torch.int32, torch.int64)
BIASES = ("gate_up_bias", "down_bias")
STACKS = ("gate_up", "down")
BETWEEN = 64 << 20  # bytes of what goes into and comes out of the matrices of experts that are taken at once


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Any,
    activations: Activations = "declared",
    maximum: Maximum = None,
) -> Tensor:
    """X (..., H) through the experts that each of its T tokens chose: (..., H), in the dtype of x.

    `topk_ids` and `topk_weights`: (T, k); `weight`: an `ExpertsWeight`; `activations` and `maximum` as its
    `get_linear` has them. DtypeError and ShapeError; ArgumentError for ids of no expert, for tensors on other
    devices, and for inputs that cannot be quantized as declared.
    """
    check_inputs(weight, activations, maximum)
    return multiply(x, topk_ids, topk_weights, weight, activations, maximum, KeptExperts())


def multiply(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Any,
    activations: Activations,
    maximum: Maximum,
    kept: KeptExperts,
) -> Tensor:
    """As `experts`, of inputs that can be quantized as declared; `kept`: what earlier calls found out."""
    check(x, topk_ids, topk_weights, weight)
    quantizes = activations == "declared" and any(getattr(weight, name).layer.activations for name in STACKS)
    if not quantizes and cuda.can_multiply_experts(x, topk_weights, weight):
        return cuda.experts_linear(x, topk_ids, topk_weights, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype if x.is_cuda else wide
    rows, weights = x.reshape(-1, x.shape[-1]), topk_weights.to(wide)
    if x.requires_grad and torch.is_grad_enabled():
        rows = rows.to(wide)  # in which gradients of a token are summed over its experts
    if is_capturing(x):
        on_device = DeviceExperts(weight, activations, maximum, narrow)
        return on_device.multiply(rows, topk_ids, weights).to(x.dtype).reshape(x.shape)
    rounded = torch.bfloat16 if rows.dtype == torch.bfloat16 and not x.is_cuda else None
    products = ExpertProducts(weight, activations, maximum, narrow, rounded, kept)
    total = torch.zeros(rows.shape, dtype=wide, device=x.device)
    for run in routed(topk_ids, weight.local.map.tolist()).runs(_most_pairs(weight)):
        _add(total, rows, weights, run, products)
    return total.to(x.dtype).reshape(x.shape)


def _add(total: Tensor, rows: Tensor, weights: Tensor, run: RoutedTokens, products: ExpertProducts) -> None:
    """To a total (T, H) what a run of experts makes of rows (T, H), one expert of a token after another."""
    facts = products.weight.facts
    tokens, slots = (torch.from_numpy(each).to(rows.device) for each in (run.tokens, run.slots))
    taken, own = rows[tokens], weights[tokens, slots][:, None]
    gate_up = products("gate_up", run, taken * own if facts.side == "input" else taken)
    made = products("down", run, facts.activation(*gate_up.chunk(2, dim=-1)))
    made = made if facts.side == "input" else made * own
    for turn in run.turns():
        here = torch.from_numpy(turn).to(rows.device)
        total.index_put_((tokens[here],), made[here], accumulate=True)


def _most_pairs(weight: Any) -> int:
    """How many rows go through experts at once, so that what is between takes no more than `BETWEEN`."""
    _, H, inner = weight.shape
    most: int = BETWEEN // (torch.float32.itemsize * (2 * H + 3 * inner))
    return max(1, most)


def check_inputs(weight: Any, activations: Activations, maximum: Maximum) -> None:
    """ArgumentError, on every rank alike, where inputs of experts cannot be quantized as they declare.

    One expert stands for all: what they declare is the same of each.
    """
    for name in STACKS:
        stack = getattr(weight, name)
        layer = replace(stack.layer, name=f"{stack.layer.name or 'experts'}.{name}")
        scheme = layer.activations
        if activations == "declared" and scheme is not None and scheme.covers_all_tokens:
            got = f"{scheme}: a token would get another result beside other tokens"
            raise ArgumentError(f"{layer.name}: activations", f"a scale of one token at most, {REMEDY}", got)
        held = {field: tensor[0] for field, tensor in stack.fields().items()}
        declared.check(stack.weight_type.unchecked(stack.config, layer, held), activations, maximum)


def check(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Any) -> None:
    """Dtypes, shapes and devices of what experts are called with, or an error that names the tensor."""
    H, name = weight.shape[1], weight.gate_up.layer.name or "experts"
    _check_tensor(f"{name}: x", x, WIDE, weight.device)
    _check_tensor(f"{name}: topk_ids", topk_ids, IDS, weight.device)
    _check_tensor(f"{name}: topk_weights", topk_weights, WIDE, weight.device)
    if x.ndim == 0 or x.shape[-1] != H:
        raise ShapeError(f"{name}: x", f"(..., {H}) = (..., H)", tuple(x.shape))
    tokens, got = x.numel() // H, tuple(topk_ids.shape)
    if len(got) != 2 or got[0] != tokens:
        raise ShapeError(f"{name}: topk_ids", f"({tokens}, k), a row for each token of x", got)
    if tuple(topk_weights.shape) != got:
        raise ShapeError(f"{name}: topk_weights", f"{got}, as topk_ids", tuple(topk_weights.shape))


def _check_tensor(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    check_type(name, tensor, Tensor)
    if tensor.dtype not in dtypes:
        raise DtypeError(name, list(map(_plain, dtypes)), _plain(tensor.dtype))
    if tensor.device != device:
        raise ArgumentError(name, f"a tensor on {device}, as the experts", str(tensor.device))


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
