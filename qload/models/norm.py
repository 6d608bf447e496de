"""RMS norm with a weight, as all supported text models have it."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from qload.errors import DtypeError, ShapeError
from qload.formats.unquantized import FLOATS
from qload.kernels.cuda import decoder_ops
from qload.parallel import Collectives, summed_and_normed
from qload.spec import Role
from qload.weights import Weights


class Norm(nn.Module):
    """RMS norm: x (..., H) / sqrt(mean(x ** 2) + `eps`), times a weight (H,), in the dtype of x."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps: float = eps
        self.register_buffer("weight", weight)

    @classmethod
    def load(cls, weights: Weights, prefix: str, size: int, eps: float) -> "Norm":
        """Load the norm under `prefix`, of `size` elements; ShapeError for another size."""
        return cls(load_tensor(weights, f"{prefix}.weight", (size,)), eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., H) along its last dimension."""
        y = decoder_ops.norm(x, self.weight, self.eps)
        return rms_norm(x, (self.weight.shape[0],), self.weight, self.eps) if y is None else y

    def of_sum(self, x: Tensor, added: Tensor, ranks: Collectives | None = None) -> tuple[Tensor, Tensor]:
        """Return x + `added`, both (..., H), and the normalized sum.

        `ranks`: `added` is the summand of this rank.
        """
        if ranks is not None:
            fused = summed_and_normed(ranks, added, x, self.weight, self.eps)
            if fused is not None:
                return fused
            added = ranks.summed(added)
        fused = decoder_ops.add_norm(x, added, self.weight, self.eps)
        if fused is not None:
            return fused
        x = x + added
        return x, self(x)


def load_tensor(weights: Weights, name: str, shape: tuple[int, ...], role: Role | None = None) -> Tensor:
    """Load a whole tensor of floats on every rank, cast by `role`; ShapeError or DtypeError."""
    info = weights.info(name)
    if info.shape != shape:
        raise ShapeError(name, f"{shape}, as the config says", info.shape, info.file)
    if not info.stored_dtype.is_floating_point:
        raise DtypeError(name, [dtype.name for dtype in FLOATS], info.stored_dtype.name, info.file)
    return weights.get_tensor(name, role=role)
