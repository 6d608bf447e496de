"""`ActivationScheme`: quantization of a layer's inputs before the product, as declared by its config.

It changes no weight and no `dequantize`, but it changes the output of a W8A8 layer, whose program first
rounds x to codes. `qload.kernels.activations` quantizes x.
"""

from dataclasses import dataclass
from typing import Literal

from qload.errors import ArgumentError, check_fields

GROUPED = ("group", "block", "tensor_group")  # strategies with scales of adjacent inputs of one token


@dataclass(frozen=True)
class ActivationScheme:
    """Quantization of a layer's inputs, as declared by its config; ArgumentError for a missing group size.

    Attributes
    ----------
    type, bits
        Number type and bits of a code: ("int", 8), or ("float", 8) for e4m3.
    dynamic
        False: static, with a stored scale. True: with scales computed from the inputs. "local": with both, a
        stored scale of the tensor and computed scales of groups.
    strategy
        Inputs of one scale: all inputs ("tensor"), one token ("token"), or `group_size` adjacent inputs of a
        token ("group", "block"; "tensor_group" with a further scale of the tensor). None: not declared.
    group_size
        Inputs of a group; None without groups.
    symmetric
        Whether code zero is zero.
    scale, zero_point
        Names of the stored scale and zero point: fields of a typed weight, full names in a `LayerInfo`,
        suffixes such as `input_scale` in a claim. None if not stored.
    scale_type
        Rounding of a computed scale: "float32" for none, "e4m3", or "e8m0", a power of two.
    upper_bound
        Largest absolute input in the computation of scales; larger inputs saturate. None: no bound.
    owner
        Program with the reference arithmetic of scales; programs round differently.
    """

    type: Literal["int", "float"]
    bits: int
    dynamic: bool | Literal["local"]
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale: str | None = None
    zero_point: str | None = None
    scale_type: Literal["float32", "e4m3", "e8m0"] = "float32"
    upper_bound: float | None = None
    owner: Literal["compressed-tensors", "transformers", "modelopt", "fbgemm"] = "compressed-tensors"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.strategy in GROUPED and self.dynamic and (self.group_size or 0) < 1:
            raise ArgumentError("group_size", f"at least 1, with {self.strategy}", str(self.group_size))

    @property
    def finds_maxima(self) -> bool:
        """True if a computed scale needs all inputs of a token, so that a share of them is not enough."""
        return self.dynamic is True and self.strategy in ("token", "tensor")

    @property
    def covers_all_tokens(self) -> bool:
        """True if one scale is computed over all tokens of a call, so that tokens depend on each other."""
        return self.dynamic is True and self.strategy == "tensor"

    @property
    def size(self) -> int | None:
        """Inputs per computed scale; None for all inputs of a token."""
        return self.group_size if self.dynamic and self.strategy in GROUPED else None

    def __str__(self) -> str:
        """Summary such as `int8 token dynamic` or `float4 tensor_group of 16 local`."""
        when = "local" if self.dynamic == "local" else "dynamic" if self.dynamic else "static"
        size = f" of {self.group_size}" if self.group_size else ""
        rest = "" if self.symmetric else " asymmetric"
        return f"{self.type}{self.bits} {self.strategy or 'unsaid':.40}{size} {when}{rest}"
