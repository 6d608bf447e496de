"""qload's mixed-precision kernels in vLLM's list of kernels, for checkpoints that vLLM loads itself."""

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.platforms import PlatformEnum, current_platform

from qload.engines.vllm.hooks import hook
from qload.engines.vllm.kernel_config import choose_kernel, to_qload_config


class QloadLinearKernel(MPLinearKernel):
    """The kernel of qload that is chosen for a layer; `VLLM_DISABLED_KERNELS` knows it by this name."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0, for any device: `can_implement` checks the device."""
        return 0

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return (True, None) for a layer `c` with a kernel better than dequantizing, or (False, reason)."""
        kernel = choose_kernel(c, _compute_capability())
        return (False, kernel) if isinstance(kernel, str) else (True, None)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer` for its kernel."""
        kernel = choose_kernel(self.config, _compute_capability())
        assert not isinstance(kernel, str), kernel  # `can_implement` returned True
        self.inner = kernel(to_qload_config(self.config), self.w_q_name, self.w_s_name, self.w_zp_name)
        self.inner.process_weights_after_loading(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by the weight of `layer`; `bias` (N,)."""
        return self.inner.apply_weights(layer, x, bias)


def put_first(platform: PlatformEnum = PlatformEnum.CUDA) -> None:
    """Insert this kernel before all others of a `platform`; a second call changes nothing."""
    kernels = hook("vllm.model_executor.kernels.linear", "_POSSIBLE_KERNELS").setdefault(platform, [])
    if QloadLinearKernel not in kernels:
        kernels.insert(0, QloadLinearKernel)


def _compute_capability() -> int | None:
    capability = current_platform.get_device_capability()
    return None if capability is None else capability.to_int()
