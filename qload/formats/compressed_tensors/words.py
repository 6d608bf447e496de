"""Common parts of pack-quantized layers: settings of their words, and tensors of the activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from qload import dtypes, spec
from qload.errors import MismatchError
from qload.layouts import compressed_tensors
from qload.layouts.packing import ClippedCodes, PackedCodes
from qload.lazy_torch import Tensor
from qload.spec import Role, TensorSpec

SCALES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
INDICES = (dtypes.int32, dtypes.int64)
SHAPE = TensorSpec("weight_shape", INDICES, "2", Role.INDEX, fact=True, spent=True)
INPUT_SCALE = TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=True, divides=True)
INPUT_ZERO_POINT = TensorSpec("input_zero_point", (dtypes.int8,), "P", Role.WORD, optional=True)


class PackedWords:
    """Mixin of configs of codes in words.

    `bits`: of a code. `dense`: whether codes straddle words; None: unknown. `shape`: (N, K) of the layer.
    """

    bits: int
    dense: bool | None
    shape: tuple[int, int] | None

    def known(self) -> dict[str, int]:
        """Return N and K of `weight_shape`, if known."""
        return dict(zip("NK", self.shape, strict=True)) if self.shape else {}


Packed = TypeVar("Packed", bound=PackedWords)


def for_words(config: Packed, headers: spec.LayerHeaders, sizes: Mapping[str, int]) -> Packed:
    """Config with the shape and the packing of a layer; MismatchError for a contradiction.

    `sizes`: N outputs, W words of inputs; K inputs if an index has them, Z words of zero points.
    """
    N, W, K = sizes["N"], sizes["W"], sizes.get("K")
    fact, dense = headers.facts.get("weight_shape"), config.dense
    capacity = compressed_tensors.capacity(W, config.bits, dense is not False)
    shape = config.shape or (N, K or capacity) if fact is None else tuple(fact.tolist())
    if shape[0] != N or shape[1] < 1 or K not in (None, shape[1]):
        name, expected = headers.names.full("weight_shape"), f"[{N}, {K or 'K'}]"
        raise MismatchError(name, "not the shape of this layer", expected, str([*shape]))
    counts = [(shape[1], W), *([(N, sizes["Z"])] if "Z" in sizes else [])]
    name = headers.names.full("weight_packed")
    dense = compressed_tensors.is_dense(name, counts, config.bits, dense)
    untyped: Any = config  # a frozen dataclass
    described: Packed = replace(untyped, shape=shape, dense=dense)
    return described


def packed_codes(config: PackedWords, words: Tensor, count: int) -> PackedCodes | ClippedCodes:
    """Return the first `count` codes of each row of words, still packed."""
    return compressed_tensors.packed_codes(words, count, config.bits, config.dense is not False)


def unpack(config: PackedWords, words: Tensor, count: int) -> Tensor:
    """Unpack the first `count` codes of each row of words."""
    return compressed_tensors.unpack(words, count, config.bits, config.dense is not False)


def pack(config: PackedWords, codes: Tensor) -> Tensor:
    """Pack codes, each row into words of its own; unused bits are 0."""
    return compressed_tensors.pack(codes, config.bits, config.dense is not False)
