"""Transforms of layers: rules of a config by layer name, and the matrices in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from qload.errors import ArgumentError, MissingTensorError, ShapeError, UnsupportedFormatError
from qload.loader.description import LayerDescription
from qload.spec.transforms import BlockTransform, Transforms, regular_hadamard
from qload.storage import WeightStorage
from qload.storage.protocol import read_array

MAX_TRANSFORM_SIZE = 1 << 15
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
    """

    matrix: str
    side: Literal["inputs", "outputs"]
    inverse: bool
    size: int | None
    selects: Callable[[str], bool]


class LayerTransforms:
    """Transforms of the layers of a checkpoint, by the `rules` of its config.

    `storage`: storage of the matrices. A matrix that several layers share is stored under one of them.
    """

    def __init__(self, rules: Sequence[TransformRule], storage: WeightStorage) -> None:
        self.rules = tuple(rules)
        self._storage = storage
        endings = tuple({f".{rule.matrix}.weight" for rule in rules if rule.matrix})
        self.names = tuple(filter(lambda name: name.endswith(endings), sorted(storage.keys())))
        self._known: dict[tuple[str, bool], BlockTransform] = {}
        self._shared: dict[tuple[str, int], str] = {}

    def rules_of(self, prefix: str) -> tuple[TransformRule, ...]:
        """Rules that select the layer `prefix`."""
        return tuple(rule for rule in self.rules if rule.selects(prefix))

    def add_to(self, layer: LayerDescription) -> LayerDescription:
        """Description with the transforms of the layer.

        UnsupportedFormatError for a plain layer, an expert, and two transforms of one side;
        MissingTensorError, ShapeError or ArgumentError for a matrix that does not fit.
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
        name = self._matrix(rule, layer.prefix, size) if rule.matrix else f"regular Hadamard matrix of {size}"
        if extent % size:
            dim = "K" if rule.side == "inputs" else "N"
            hint = f"{layer.prefix} has {dim} = {extent}, which blocks of {size} do not divide"
            raise ShapeError(name, "blocks that divide the layer", (size, size), None, hint)
        key = name, rule.inverse
        if key not in self._known:
            matrix = read_array(self._storage, name) if rule.matrix else regular_hadamard(size)
            self._known[key] = BlockTransform.of_matrix(name, matrix, transposed=rule.inverse)
        return self._known[key]

    def _matrix(self, rule: TransformRule, prefix: str, size: int) -> str:
        """Name of the matrix of a layer: its own, else the one of this size under another layer."""
        own = f"{prefix}.{rule.matrix}.weight"
        if size > MAX_TRANSFORM_SIZE:
            raise ArgumentError(own, f"a matrix of at most {MAX_TRANSFORM_SIZE} rows", str(size))
        if own in self.names and self._storage.info(own).shape == (size, size):
            return own
        key = rule.matrix, size
        if key not in self._shared:
            self._shared[key] = self._find_shared(own, f".{rule.matrix}.weight", size)
        return self._shared[key]

    def _find_shared(self, own: str, ending: str, size: int) -> str:
        """Name of a matrix of a size; MissingTensorError; UnsupportedFormatError if several differ."""
        names = [name for name in self.names if name.endswith(ending)]
        fitting = [name for name in names if self._storage.info(name).shape == (size, size)]
        if not fitting:
            raise MissingTensorError(own, near=names[:1])
        first, *others = fitting
        for other in others:
            if not np.array_equal(read_array(self._storage, first), read_array(self._storage, other)):
                reason = f"{own} is not stored, and {first} and {other} differ"
                raise UnsupportedFormatError("transforms with two readings", reason, remedy=WAY_OUT)
        return first
