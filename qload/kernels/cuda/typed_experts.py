"""The experts of a layer on a CUDA device, where the kernel for experts reads their stacks as they lie."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.kernel_formats.strips import StripsWeight
from qload.kernels.cuda import experts
from qload.kernels.cuda.calls import ACTIVATIONS
from qload.kernels.cuda.experts_call import ExpertMatrix
from qload.kernels.cuda.module import why_not

STACKS = ("gate_up", "down")
BITS, GROUPS = (4, 8), (-1, 32, 64, 128)


def why_no_experts(weight: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel takes no activations of a `dtype` through an `ExpertsWeight` on a device, or None."""
    reason = why_not()
    if reason is not None:
        return reason
    if device.type != "cuda":
        return f"needs a CUDA device, got {device}"
    if dtype not in ACTIVATIONS:
        return f"x has to be float16 or bfloat16, got {dtype}"
    for name in STACKS:
        reason = _why_not_stack(getattr(weight, name), getattr(weight, f"{name}_bias"), dtype)
        if reason is not None:
            return f"{name}: {reason}"
    if weight.local.total > experts.MOST_EXPERTS:
        return f"at most {experts.MOST_EXPERTS} experts, got {weight.local.total}"
    return experts.why_not(device)


def can_multiply_experts(x: Tensor, topk_weights: Tensor, weight: Any) -> bool:
    """Whether `experts_linear` takes this: stacks that fit, and no gradient asked for."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
    if wanted or topk_weights.dtype not in (torch.float32, *ACTIVATIONS):
        return False
    return why_no_experts(weight, x.dtype, x.device) is None


def experts_linear(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Any) -> Tensor:
    """(..., H) -> (..., H) in x's dtype, sums in float32; asks nobody whether the stacks fit.

    The host waits for nothing, so that no id is looked at there: one of no expert makes the result of its
    token NaN.
    """
    local, activation = weight.local, weight.facts.activation
    y = experts.multiply(
        x.reshape(-1, x.shape[-1]),
        topk_ids,
        topk_weights,
        *(_matrix(getattr(weight, name), getattr(weight, f"{name}_bias")) for name in STACKS),
        activation=activation.kind,
        alpha=activation.alpha or 0.0,  # 0 where the kind has none
        limit=activation.limit or 0.0,
        weighs_inputs=weight.facts.side == "input",
        expert_map=None if len(local) == local.total else _map(local, x.device),
    )
    return y.reshape(x.shape)


def _why_not_stack(stack: Any, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    config, tensors = stack.config, stack.fields()
    if stack.weight_type is not StripsWeight:
        return f"no kernel reads experts as {stack.format}"
    if config.bits not in BITS or config.group_size not in GROUPS:
        return f"groups of {config.group_size} of {config.bits} bits"
    if not all(tensor.is_contiguous() for tensor in tensors.values()):
        return "stacks that are not contiguous"
    others = [tensor.dtype for tensor in (tensors["scales"], bias) if tensor is not None]
    if any(other != dtype for other in others):
        return f"x is {dtype}, scales and biases are {', '.join(map(str, others))}"
    return None


def _matrix(stack: Any, bias: Tensor | None) -> ExpertMatrix:
    held, config = stack.fields(), stack.config
    _, N, K = stack.shape
    return ExpertMatrix(
        held["qweight"],
        held["scales"],
        held.get("qzeros"),
        held.get("perm"),
        bias,
        N,
        K,
        config.bits,
        config.group_size,
    )


@cache
def _map(local: Any, device: torch.device) -> Tensor:
    """Moved once, as a captured graph cannot."""
    places: Tensor = local.map
    return places.to(torch.int32).to(device)
