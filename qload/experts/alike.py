"""Experts of a layer are alike in all that a stack has once: seen in headers and facts, before any weight."""

from collections.abc import Iterator
from typing import Any

from qload.errors import MismatchError
from qload.loader import LayerDescription
from qload.loader.description import configs_apart
from qload.spec import TensorSpec


def check_alike(first: LayerDescription, other: LayerDescription) -> None:
    """One matrix of two experts: MismatchError that names the other's where a stack could not hold both."""
    if other.specs is first.specs and other.sizes is first.sizes and other.format is first.format:
        return  # described once, as layers are that have the same headers
    for what, a, b in _compared(first, other):
        if a != b:
            raise MismatchError(
                other.prefix,
                f"experts of one layer differ in {what}",
                f"{a} as in {first.prefix}",
                str(b),
            )


def _compared(first: LayerDescription, other: LayerDescription) -> Iterator[tuple[str, Any, Any]]:
    kept, others = ([spec for spec in layer.specs if not spec.spent] for layer in (first, other))
    yield "format", first.format.weight_type.format, other.format.weight_type.format
    yield "tensors", _names(kept), _names(others)
    yield "(N, K)", (first.N, first.K), (other.N, other.K)
    yield "config", *configs_apart(first.format.config, other.format.config)
    yield "what is declared of its inputs", first.format.activations, other.format.activations
    for one, two in zip(kept, others, strict=True):
        a, b = (str(layer.dtypes[one.name]).removeprefix("torch.") for layer in (first, other))
        yield f"the dtype of {one.name}", a, b
        yield f"the axes of {one.name}", one.text, two.text
    for dim in first.sizes.keys() | other.sizes.keys():
        yield f"the size of {dim}", first.sizes.get(dim), other.sizes.get(dim)


def _names(specs: list[TensorSpec]) -> str:
    return ", ".join(spec.name for spec in specs)
