"""What a config claims of a layer's inputs: they are quantized too, and how.

A claim changes no weight. Whoever multiplies in the codes of both sides asks for it; all others multiply by
inputs as they come.
"""

from dataclasses import dataclass
from typing import Literal

from qload.errors import check_fields


@dataclass(frozen=True)
class ActivationScheme:
    """How the inputs of a layer are quantized, as its config claims it.

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
    scale
        The name of the stored scale; in what a format claims only its suffix, as `input_scale`. None where
        none is stored.
    """

    type: Literal["int", "float"]
    bits: int
    dynamic: bool | Literal["local"]
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool = True
    scale: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
