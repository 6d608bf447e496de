"""The norm of all these models: by the root mean square, with a weight or without."""

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from qload.errors import ShapeError
from qload.kernels.cuda import step
from qload.spec import Role
from qload.weights import Weights


class Norm(nn.Module):
    """x (..., H) divided by the root of its mean square plus `eps`, times a weight (H,), in x's dtype."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.eps: float = eps
        self.register_buffer("weight", weight)

    @classmethod
    def load(cls, weights: Weights, prefix: str, size: int, eps: float) -> "Norm":
        """The norm under `prefix`, of `size` numbers; ShapeError where it has others."""
        return cls(vector(weights, f"{prefix}.weight", size), eps)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., H), normalized along its last dimension."""
        y = step.norm(x, self.weight, self.eps)
        return rms_norm(x, (self.weight.shape[0],), self.weight, self.eps) if y is None else y

    def of_sum(self, x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """X + `added`, both (..., H), and that normalized."""
        made = step.add_norm(x, added, self.weight, self.eps)
        if made is not None:
            return made
        x = x + added
        return x, self(x)


def vector(weights: Weights, name: str, size: int, role: Role | None = None) -> Tensor:
    """The whole tensor `name`, (size,), on every rank, cast by `role`; ShapeError for another shape."""
    if weights.get_shape(name) != (size,):
        raise ShapeError(name, f"({size},)", weights.get_shape(name))
    return weights.get_tensor(name, role=role)
