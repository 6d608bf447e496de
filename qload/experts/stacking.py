"""Stacks are filled one expert at a time, in memory that is taken once."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from qload.devices import in_large_pages
from qload.errors import ArgumentError, MismatchError
from qload.experts.stack import Stack
from qload.loader.description import configs_apart
from qload.spec import Weight


class Stacking:
    """A stack of `count` experts that is being filled, called `name` as a whole.

    The first expert says what all others have to be: MismatchError with the name of one that is not.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._first: Weight | None = None
        self._names: list[str] = []
        self._tensors: dict[str, Tensor] = {}

    def places(self) -> dict[str, Tensor]:
        """Where the tensors of the next expert go, by field; none are known before the first."""
        at = len(self._names)
        return {field: tensor[at] for field, tensor in self._tensors.items()}

    def put(self, weight: Weight) -> None:
        """Take the next expert; what it holds of `places` already is not moved."""
        if self._first is None:
            self._tensors = {field: self._empty(tensor) for field, tensor in weight.fields().items()}
            self._first = type(weight).unchecked(weight.config, weight.layer, self.places())
        self._first, weight = _like(self._first, weight), _like(weight, self._first)
        check_alike(self._first, weight)
        for field, place in self.places().items():
            held = weight.fields()[field]
            if held.data_ptr() != place.data_ptr() or not held.numel():
                place.copy_(held)
        self._names.append(weight.layer.name)

    def stack(self) -> Stack:
        """The stack, once every expert is there."""
        if self._first is None or len(self._names) != self._count:
            raise ArgumentError(self._name, f"{self._count} experts, at least 1", str(len(self._names)))
        first = self._first
        layer = replace(first.layer, name=self._name)
        return Stack(type(first), first.config, layer, tuple(self._names), self._tensors)

    def _empty(self, tensor: Tensor) -> Tensor:
        shape = (self._count, *tensor.shape)
        return in_large_pages(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))


def stacked(name: str, count: int, weights: Iterable[Weight]) -> Stack:
    """`count` typed weights, each made when the one before is in its place; MismatchError."""
    stacking = Stacking(name, count)
    for weight in weights:
        stacking.put(weight)
        del weight  # before the next one is made
    return stacking.stack()


def _like(weight: Weight, other: Weight) -> Weight:
    """The weight with the zero-point convention of `other`, if that changes no value."""
    config, origin = weight.config.like(other.config), weight.layer.origin
    if origin is not None and other.layer.origin is not None:
        origin = origin.like(other.layer.origin)
    if config is weight.config and origin is weight.layer.origin:
        return weight
    return type(weight).unchecked(config, replace(weight.layer, origin=origin), weight.fields())


def check_alike(first: Weight, other: Weight) -> None:
    """Two experts have one format, config, shape and the same tensors; MismatchError names the other."""
    for what, a, b in (
        ("format", first.format, other.format),
        ("config", *configs_apart(first.config, other.config)),
        ("(N, K)", first.shape, other.shape),
        ("layer", replace(first.layer, name=""), replace(other.layer, name="")),
        ("tensors", _described(first), _described(other)),
    ):
        if a != b:
            raise MismatchError(
                other.layer.name,
                f"experts of one layer differ in {what}",
                f"{a} as in {first.layer.name}",
                str(b),
                "remedy   load them without a target, and repack them: RepackError says what is in the way",
            )


def _described(weight: Weight) -> str:
    return ", ".join(
        f"{field} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for field, tensor in weight.fields().items()
    )
