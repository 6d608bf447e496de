"""The kernel of our own order: what Marlin's takes, with the codes where Hopper reads them faster."""

from qload.formats import GPTQWeight
from qload.kernel_formats import strips
from qload.kernels.mp_linear.contract import MPLinearLayerConfig
from qload.kernels.mp_linear.marlin import MarlinLinearKernel
from qload.kernels.mp_linear.reasons import rows_missing
from qload.kernels.mp_linear.typed import TypedLinearKernel
from qload.spec import Weight


class StripsLinearKernel(TypedLinearKernel):
    """Multiplies weights in strips of 64 columns, on Hopper GPUs."""

    name = "strips"
    bits = MarlinLinearKernel.bits
    act_types = MarlinLinearKernel.act_types

    @classmethod
    def get_min_capability(cls) -> int:
        """That of Hopper, 9.0: chips before it have no kernel that reads strips."""
        return strips.CAPABILITY

    @classmethod
    def gains(cls, compute_capability: int | None) -> bool:
        """On Hopper: elsewhere Marlin's order has more kernels."""
        return strips.are_faster(compute_capability)

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """As Marlin's; act order only where this rank has all rows."""
        _, reason = MarlinLinearKernel.can_implement(c)
        reason = reason or rows_missing(c)
        return reason is None, reason

    def repacked(self, weight: GPTQWeight) -> Weight:
        """In strips of 64 columns, padded to whole ones; refuses what cannot be rounded for many tokens."""
        self.check_range(weight)
        return strips.from_integers(weight.to_integers(), self.config.zero_points)
