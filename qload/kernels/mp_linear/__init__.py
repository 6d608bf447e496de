"""Mixed-precision linear kernels for engines, and the choice of one for a layer."""

from qload.errors import ArgumentError, NoKernelError, check_type
from qload.kernels.mp_linear.contract import MPLinearKernel, MPLinearLayerConfig, malformed
from qload.kernels.mp_linear.kernels import (
    KERNELS,
    DequantizeLinearKernel,
    ExllamaLinearKernel,
    MarlinLinearKernel,
    StripsLinearKernel,
)
from qload.kernels.mp_linear.parameters import permute_param_layout_


def choose_mp_linear_kernel(
    config: MPLinearLayerConfig, compute_capability: int | None = None
) -> type[MPLinearKernel]:
    """Return the first kernel of `KERNELS` that supports a layer.

    Parameters
    ----------
    config
        The layer.
    compute_capability
        The device's, times 10; None: no CUDA device.

    Raises
    ------
    NoKernelError
        If no kernel supports the layer, with the reason of each.
    ArgumentError
        If the compute capability is not an integer.

    Examples
    --------
    >>> import torch
    >>> from qload import MPLinearLayerConfig, choose_mp_linear_kernel, scalar_types
    >>> config = MPLinearLayerConfig(
    ...     full_weight_shape=(4096, 4096),
    ...     partition_weight_shape=(4096, 2048),
    ...     weight_type=scalar_types.uint4b8,
    ...     act_type=torch.float16,
    ...     group_size=128,
    ...     zero_points=False,
    ... )
    >>> choose_mp_linear_kernel(config, compute_capability=80).__name__
    'MarlinLinearKernel'
    """
    if type(compute_capability) is not int and compute_capability is not None:
        raise ArgumentError("compute_capability", "a whole number, such as 90", repr(compute_capability))
    check_type("config", config, MPLinearLayerConfig)
    reasons = {}
    for kernel in KERNELS:
        least = kernel.get_min_capability()
        able, reason = kernel.can_implement(config)
        if able and not kernel.gains(compute_capability):
            able, reason = False, f"gains nothing on other devices than those of compute capability {least}"
        elif able and compute_capability is not None and compute_capability < least:
            able, reason = False, f"needs compute capability {least}, this device has {compute_capability}"
        if able:
            return kernel
        reasons[kernel.__name__] = reason or ""
    if malformed(config):
        raise NoKernelError("a malformed config", reasons)
    K, N = config.partition_weight_shape
    raise NoKernelError(f"{config.weight_type} (K, N) = ({K}, {N})", reasons)


__all__ = [
    "KERNELS",
    "DequantizeLinearKernel",
    "ExllamaLinearKernel",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "MarlinLinearKernel",
    "StripsLinearKernel",
    "choose_mp_linear_kernel",
    "permute_param_layout_",
]
