"""ExLlama's kernel: 2, 3, 4 and 8 bits, any group size, every convention of zero points."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from qload.formats import GPTQWeight
from qload.kernel_formats import exllama
from qload.kernels import cuda
from qload.kernels.mp_linear.contract import MPLinearLayerConfig
from qload.kernels.mp_linear.reasons import rows_missing
from qload.kernels.mp_linear.typed import TypedLinearKernel
from qload.kernels.products import wants_gradients
from qload.kernels.scalar_type import ScalarType, integer_type
from qload.kernels.scratch import ScratchRequest, add_scratch_request, multiply
from qload.spec import Weight


class ExllamaLinearKernel(TypedLinearKernel):
    """Weights in ExLlama's order, dequantized into scratch space that `warm_up` provides.

    Weights without zero points get those of their type's bias, stored minus one. Scales have the type of the
    activations, or are fp16, of which bf16 has the range: what other types hold might be lost. What a code
    may mean, `SUPPORTED_QUANT_TYPES` lists, those without zero points first.
    """

    name = "exllama"
    bits = (2, 3, 4, 8)
    SUPPORTED_QUANT_TYPES: ClassVar[tuple[ScalarType, ...]] = tuple(
        integer_type(size, zero_points=stored) for stored in (False, True) for size in (2, 3, 4, 8)
    )
    act_types = (torch.float16, torch.bfloat16)

    @classmethod
    def get_min_capability(cls) -> int:
        """That of Pascal, 6.0."""
        return 60

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """As every kernel; scales of fp16 or of the inputs' dtype; act order only with all rows here."""
        able, reason = super().can_implement(c)
        if able and c.scale_dtype not in (torch.float16, c.act_type):
            taken = "float16" if c.act_type == torch.float16 else f"float16 or {c.act_type}"
            return False, f"multiplies by scales of {taken}, got {c.scale_dtype}".replace("torch.", "")
        reason = reason or rows_missing(c)
        return reason is None, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """Rows of a group together, each word shuffled; refuses what the inputs' dtype cannot hold."""
        self.check_range(weight)  # small ones keep their bits: multiples of scales of that type
        return exllama.from_integers(weight.to_integers())

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As every kernel, and a note of how much scratch space the layer needs."""
        super().process_weights_after_loading(layer)
        add_scratch_request(layer, ScratchRequest(self.w_q_name, *self.config.partition_weight_shape))

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) fp16 or bf16 -> (..., N) of the same dtype, sums in float32.

        By a CUDA kernel that needs no scratch space, or with weights rounded to that dtype there: then
        NotWarmError before `warm_up`.
        """
        if torch.compiler.is_compiling() or wants_gradients(x, bias):
            return super().apply_weights(layer, x, bias)
        weight = self.typed(layer)
        if weight.activations is not None or (x.is_cuda and cuda.can_multiply(x, weight, bias)):
            return super().apply_weights(layer, x, bias)
        return multiply(layer, x, weight, self.w_q_name, bias)
