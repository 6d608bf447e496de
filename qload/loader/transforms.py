"""Transforms of layers: rules of a config by layer name, and the matrices in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qload import dtypes
from qload.errors import ArgumentError, MissingTensorError, ShapeError, UnsupportedFormatError
from qload.loader.description import LayerDescription
from qload.spec.transforms import BlockTransform, Transforms, regular_hadamard
from qload.storage import WeightStorage
from qload.storage.protocol import read_array

MAX_TRANSFORM_SIZE = 1 << 15
TENSORS = ("weight", "perm")  # tensors of a transform: its matrix, and a permutation of rows and columns
# Endings of transforms at run time in compressed-tensors; `weight_input` and `weight_output` are folded.
MATRICES = ("_input.weight", "_output.weight")
FOLDED = tuple(f"_weight{ending}" for ending in MATRICES)
WAY_OUT = "vLLM runs it"


@dataclass(frozen=True)
class TransformRule:
    """Transform of the inputs or outputs of the layers that an entry of a config selects.

    Attributes
    ----------
    matrix
        Module of the stored matrix within the layer, such as `v_input`; "": a regular Hadamard matrix, which
        is not stored.
    side
        "inputs" or "outputs".
    inverse
        Whether the transposed matrix is applied.
    size
        Entries of a block; None: all of that side.
    selects
        Predicate on names of layers; engines need to pickle it.
    permuted
        Whether a stored permutation reorders the rows and columns of the stored matrix.
    """

    matrix: str
    side: Literal["inputs", "outputs"]
    inverse: bool
    size: int | None
    selects: Callable[[str], bool]
    permuted: bool = False


def find_matrix(stored: Collection[str]) -> str | None:
    """First name among `stored` of a transform's matrix inside a compressed-tensors layer, or None."""
    for name in [name for name in stored if name.endswith(MATRICES) and not name.endswith(FOLDED)]:
        prefix = name.rsplit(".", 2)[0]
        if f"{prefix}.weight_packed" in stored or f"{prefix}.weight_scale" in stored:
            return name
    return None


class LayerTransforms:
    """Transforms of the layers of a checkpoint, by the `rules` of its config.

    `storage`: storage of the matrices and of their permutations. A tensor that several layers share is stored
    under one of them.
    """

    def __init__(self, rules: Sequence[TransformRule], storage: WeightStorage) -> None:
        self.rules = tuple(rules)
        self._storage = storage
        endings = tuple({f".{rule.matrix}.{kind}" for rule in rules if rule.matrix for kind in TENSORS})
        self.names = tuple(filter(lambda name: name.endswith(endings), sorted(storage.keys())))
        self._known: dict[tuple[str, str, bool], BlockTransform] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], str] = {}

    def rules_of(self, prefix: str) -> tuple[TransformRule, ...]:
        """Rules that select the layer `prefix`."""
        return tuple(rule for rule in self.rules if rule.selects(prefix))

    def add_to(self, layer: LayerDescription) -> LayerDescription:
        """Description with the transforms of the layer.

        UnsupportedFormatError for a plain layer, an expert, two transforms of one side, and a permutation
        that the config does not declare; MissingTensorError, ShapeError or ArgumentError for a matrix or a
        permutation that does not fit.
        """
        rules, is_plain = self.rules_of(layer.prefix), layer.format.weight_type.plain
        is_matrix = f"{layer.prefix}.weight" in self.names
        if not rules or is_matrix or (is_plain and len(layer.sizes) < 2):
            return layer
        sides = [rule.side for rule in rules]
        reasons = {
            "it is an expert": ".experts." in layer.prefix,
            "its weight is plain": is_plain,
            "several transforms apply to one side": len({*sides}) < len(sides),
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            text = f"{layer.prefix} transforms its {' and '.join(sides)} at run time, and {reason}"
            raise UnsupportedFormatError("transforms of such a layer", text, remedy=WAY_OUT)
        transforms: dict[str, Any] = {rule.side: self._transform(rule, layer) for rule in rules}
        return replace(layer, transforms=Transforms(**transforms), cuts={})

    def _transform(self, rule: TransformRule, layer: LayerDescription) -> BlockTransform:
        extent = layer.K if rule.side == "inputs" else layer.N
        size = extent if rule.size is None else rule.size
        if size > MAX_TRANSFORM_SIZE:
            own = f"{layer.prefix}.{rule.matrix}.weight"
            raise ArgumentError(own, f"a matrix of at most {MAX_TRANSFORM_SIZE} rows", str(size))
        name, order = f"regular Hadamard matrix of {size}", ""
        if rule.matrix:
            name = self._find(layer.prefix, f".{rule.matrix}.weight", (size, size))
            order = self._find_order(rule, layer.prefix, size)
        if extent % size:
            dim = "K" if rule.side == "inputs" else "N"
            hint = f"{layer.prefix} has {dim} = {extent}, which blocks of {size} do not divide"
            raise ShapeError(name, "blocks that divide the layer", (size, size), None, hint)
        key = name, order, rule.inverse
        if key not in self._known:
            matrix = self._read(name) if rule.matrix else regular_hadamard(size)
            if order:
                rows = self._read_order(order)
                matrix = matrix[rows][:, rows]
            self._known[key] = BlockTransform.of_matrix(name, matrix, transposed=rule.inverse)
        return self._known[key]

    def _read(self, name: str) -> NDArray[Any]:
        """Read a matrix without torch; bfloat16, which numpy lacks, becomes float32."""
        values = read_array(self._storage, name)
        if self._storage.info(name).stored_dtype is dtypes.bfloat16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def _read_order(self, name: str) -> NDArray[Any]:
        """Read a permutation; ArgumentError unless it has every index once."""
        order = read_array(self._storage, name)
        size, count = len(order), len(np.unique(order))
        if order.dtype.kind not in "iu" or not np.array_equal(np.sort(order), np.arange(size)):
            got = f"{count} different values of {self._storage.info(name).dtype}"
            raise ArgumentError(name, f"every index below {size} once", got)
        return order

    def _find_order(self, rule: TransformRule, prefix: str, size: int) -> str:
        """Name of the permutation of a layer's matrix; "" without one."""
        ending = f".{rule.matrix}.perm"
        if rule.permuted:
            return self._find(prefix, ending, (size,))
        stored = next((name for name in self.names if name.endswith(ending)), None)
        if stored is None:
            return ""
        reason = f"{stored} is stored, and its scheme in transform_config has no randomize: true"
        remedy = "set randomize, or remove the tensor"
        raise UnsupportedFormatError("permutations without randomize", reason, remedy=remedy)

    def _find(self, prefix: str, ending: str, shape: tuple[int, ...]) -> str:
        """Name of a tensor of a layer: its own, else the one of this shape under other layers.

        ShapeError for its own tensor of another shape.
        """
        own = prefix + ending
        if own in self.names:
            stored = self._storage.info(own).shape
            if stored != shape:
                raise ShapeError(own, f"{shape}, a block of the transform", stored)
            return own
        key = ending, shape
        if key not in self._shared:
            self._shared[key] = self._find_shared(own, ending, shape)
        return self._shared[key]

    def _find_shared(self, own: str, ending: str, shape: tuple[int, ...]) -> str:
        """Name of a tensor of a shape; MissingTensorError; UnsupportedFormatError if several differ."""
        names = [name for name in self.names if name.endswith(ending)]
        fitting = [name for name in names if self._storage.info(name).shape == shape]
        if not fitting:
            raise MissingTensorError(own, near=names[:1])
        first, *others = fitting
        for other in others:
            if not np.array_equal(self._read(first), self._read(other)):
                reason = f"{own} is not stored, and {first} and {other} differ"
                raise UnsupportedFormatError("transforms with two readings", reason, remedy=WAY_OUT)
        return first
