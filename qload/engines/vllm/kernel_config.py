"""Choice of qload's kernel for vLLM's config of a mixed-precision layer."""

from typing import Any

from qload.errors import ArgumentError, NoKernelError
from qload.kernels import DequantizeLinearKernel, MPLinearKernel, MPLinearLayerConfig, choose_mp_linear_kernel
from qload.kernels.scalar_type import scalar_types


def to_qload_config(c: Any) -> MPLinearLayerConfig:
    """Convert `c`, an `MPLinearLayerConfig` of vLLM; ArgumentError for an unknown type of codes.

    vLLM repacks weights to words of consecutive codes, with zero points as integers.
    """
    weight_type = getattr(scalar_types, str(c.weight_type), None)
    if weight_type is None:
        raise ArgumentError("weight_type", "one of qload.scalar_types", str(c.weight_type))
    return MPLinearLayerConfig(
        full_weight_shape=tuple(c.full_weight_shape),
        partition_weight_shape=tuple(c.partition_weight_shape),
        weight_type=weight_type,
        act_type=c.act_type,
        group_size=c.group_size,
        zero_points=c.zero_points,
        out_type=c.out_type,
    )


def choose_kernel(c: Any, compute_capability: int | None) -> type[MPLinearKernel] | str:
    """Return the kernel of a layer, or the reason for none, on a device (None: no CUDA device)."""
    try:
        kernel = choose_mp_linear_kernel(to_qload_config(c), compute_capability)
    except (ArgumentError, NoKernelError) as error:
        return str(error)
    if compute_capability is not None and kernel is DequantizeLinearKernel:
        return "it would be dequantized at each call"
    return kernel
