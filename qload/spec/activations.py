"""How the inputs of a layer are quantized before it multiplies: a fact of its typed weight.

No weight depends on it, and no `dequantize`. Half of what a W8A8 layer means is here all the same: its owner
rounds x to codes first. What x becomes stands in `qload.kernels.activations`.
"""

from dataclasses import dataclass
from typing import Literal

from qload.errors import ArgumentError, check_fields

GROUPED = ("group", "block", "tensor_group")  # strategies whose scales are of neighbours of one token


@dataclass(frozen=True)
class ActivationScheme:
    """How the inputs of a layer are quantized, as its config declares it; ArgumentError for no group size.

    Attributes
    ----------
    type, bits
        Whole numbers or floats, and how many bits a code has: ("int", 8), or ("float", 8) for e4m3.
    dynamic
        False: by a scale that was found beforehand and is stored. True: by scales that are found as the
        inputs come. "local": by both, a stored scale of the tensor and scales of groups that are found.
    strategy
        Which inputs share a scale: all ("tensor"), those of one token, or `group_size` neighbours of one
        token ("group", "block"; "tensor_group" where a scale of the tensor comes on top). None: the config
        does not say.
    group_size
        How many neighbours; None where a scale is not for a group of them.
    symmetric
        Whether zero is code zero.
    scale, zero_point
        The names of the stored scale and zero point: of a typed weight its fields, of a `LayerInfo` whole
        names, of a claim suffixes such as `input_scale`. None where none is stored.
    scale_type
        What a scale that is found is rounded to: "float32" is not rounded, "e4m3", or "e8m0", a power of two.
    upper_bound
        The largest absolute input that scales look at, what is beyond saturates; None: no bound.
    owner
        Whose arithmetic finds the scales, which owners round differently.
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
            raise ArgumentError("group_size", f"at least 1, beside {self.strategy}", str(self.group_size))

    @property
    def finds_maxima(self) -> bool:
        """Whether a scale covers all inputs of a token, or more: a share of these inputs does not tell it."""
        return self.dynamic is True and self.strategy in ("token", "tensor")

    @property
    def covers_all_tokens(self) -> bool:
        """Whether one scale is found over all tokens of a call, so that each depends on the others."""
        return self.dynamic is True and self.strategy == "tensor"

    @property
    def size(self) -> int | None:
        """How many neighbours share a scale that is found; None where all inputs of a token do."""
        return self.group_size if self.dynamic and self.strategy in GROUPED else None

    def __str__(self) -> str:
        """In a few words: `int8 token dynamic`, `float4 tensor_group of 16 local`."""
        when = "local" if self.dynamic == "local" else "dynamic" if self.dynamic else "static"
        size = f" of {self.group_size}" if self.group_size else ""
        rest = "" if self.symmetric else " asymmetric"
        return f"{self.type}{self.bits} {self.strategy or 'unsaid':.40}{size} {when}{rest}"
