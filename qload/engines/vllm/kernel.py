"""qload's mixed-precision kernels as one in vLLM's own list, for checkpoints that vLLM reads itself."""

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.platforms import PlatformEnum, current_platform

from qload.engines.vllm.hooks import hook
from qload.engines.vllm.kernel_config import chosen, translated


class QloadLinearKernel(MPLinearKernel):
    """Whichever of qload's kernels multiplies a layer; `VLLM_DISABLED_KERNELS` knows it by this name."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device: `can_implement` asks for it."""
        return 0

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """(True, None) for a layer `c` that a kernel here gains with, or (False, why not)."""
        kernel = chosen(c, _capability())
        return (False, kernel) if isinstance(kernel, str) else (True, None)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Repack the parameters of `layer` for its kernel."""
        kernel = chosen(self.config, _capability())
        assert not isinstance(kernel, str), kernel  # `can_implement` said yes
        self.inner = kernel(translated(self.config), self.w_q_name, self.w_s_name, self.w_zp_name)
        self.inner.process_weights_after_loading(layer)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N), in x's dtype, by the weight of `layer`; `bias` (N,)."""
        return self.inner.apply_weights(layer, x, bias)


def put_first(platform: PlatformEnum = PlatformEnum.CUDA) -> None:
    """Ask this kernel before all others of a `platform`; a second call changes nothing."""
    kernels = hook("vllm.model_executor.kernels.linear", "_POSSIBLE_KERNELS").setdefault(platform, [])
    if QloadLinearKernel not in kernels:
        kernels.insert(0, QloadLinearKernel)


def _capability() -> int | None:
    found = current_platform.get_device_capability()
    return None if found is None else found.to_int()
