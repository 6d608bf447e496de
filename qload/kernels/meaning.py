"""What the tensors of a layer mean to whoever multiplies them, under a key that equal layers share.

A traced model cannot hold a typed weight: it holds the tensors, and the key. So the key is made of what a
layer is, not of its name nor of the order in which layers were made: 32 blocks of a model are one graph, and
a graph that was stored by another process finds what it meant once its modules are made.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from hashlib import sha256

import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels import products, reference, sums
from qload.kernels.cuda.plans import LinearPlan, plan_of
from qload.kernels.declared import Activations, Maximum
from qload.spec import Weight


def without_tensors(weight: Weight) -> Weight:
    """The same weight of tensors without memory: shapes, dtypes, config and layer."""
    return weight.holding({name: tensor.to("meta") for name, tensor in weight.fields().items()})


def over(blueprint: Weight, held: Sequence[Tensor]) -> Weight:
    """A blueprint's weight of `held`, a tensor for each of its fields, in their order."""
    plain = [each.detach() if type(each) is torch.nn.Parameter else each for each in held]  # writes count
    return blueprint.holding(dict(zip(blueprint.fields(), plain, strict=True)))


class LinearMeaning:
    """How the tensors of layers that are alike are multiplied.

    Attributes
    ----------
    blueprint
        The typed weight without tensors and name.
    names
        Its fields, in the order in which a call gets their tensors.
    key
        Under which it is found.
    """

    def __init__(self, blueprint: Weight, activations: Activations, maximum: Maximum) -> None:
        self.blueprint, self.activations, self.maximum = blueprint, activations, maximum
        self.names = tuple(blueprint.fields())
        self.key = key_of(blueprint, activations, maximum)
        self._made = tuple((tensor.shape, tensor.dtype) for tensor in blueprint.fields().values())
        self._plans: dict[tuple[int, torch.dtype], LinearPlan | None] = {}

    @property
    def straight_through(self) -> str:
        """The key of the same product of inputs as they come."""
        return share(self.blueprint, "unquantized", None).key

    def typed(self, held: Sequence[Tensor]) -> Weight:
        """The typed weight over `held`, without a name."""
        return over(self.blueprint, held)

    def multiply(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y (..., N) of x (..., K), without gradients, on the device on which they are."""
        if x.is_cuda and self.fits(x, held, bias):
            plan = self.plan(x, held)
            pointers = [tensor.data_ptr() for tensor in held]
            y = None if plan is None else plan.multiply(x, held, pointers, bias, self.typed)
            if y is not None:
                return y
        return reference.linear(x, self.typed(held), bias, self.activations, self.maximum)

    def fits(self, x: Tensor, held: Sequence[Tensor], bias: Tensor | None) -> bool:
        """Whether tensors are what native code takes them for, which gets nothing but pointers."""
        index = x.get_device()
        for tensor, (shape, dtype) in zip(held, self._made, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.get_device() != index:
                return False
            if not tensor.is_contiguous():
                return False
        if bias is None:
            return True
        alike = bias.dtype == x.dtype and bias.get_device() == index
        return alike and bias.shape == (self.blueprint.layer.N,) and bias.is_contiguous()

    def plan(self, x: Tensor, held: Sequence[Tensor]) -> LinearPlan | None:
        """How x is multiplied by tensors that fit, on its device and in its dtype; None: not by a launch."""
        where = x.get_device(), x.dtype
        if where not in self._plans:
            quantizes = self.activations == "declared" and self.blueprint.activations is not None
            self._plans[where] = None if quantizes else plan_of(self.typed(held), x.dtype)
        return self._plans[where]

    def gradient(self, gradient: Tensor, held: Sequence[Tensor]) -> Tensor:
        """Of x, (..., K), in the dtype of `gradient` (..., N): its product with the weight, in slices.

        As if inputs were not quantized, where they are. Both are rounded to that dtype, sums are in float32.
        """
        weight = self.typed(held)
        rows = gradient.reshape(math.prod(gradient.shape[:-1]), weight.layer.N)
        with sums.in_given_types(gradient):
            made = products.transposed(rows, weight, weight.input_factors)
        return made.reshape(*gradient.shape[:-1], weight.layer.K)


_KNOWN: dict[str, LinearMeaning] = {}  # by key, for as long as the process runs: graphs hold the keys


def known(key: str) -> LinearMeaning:
    """What a key means; ArgumentError where no module of this process was made that has it."""
    if key not in _KNOWN:
        raise ArgumentError("meaning", "that of a layer that this process has made", repr(key))
    return _KNOWN[key]


def share(weight: Weight, activations: Activations, maximum: Maximum) -> LinearMeaning:
    """The meaning that all layers like this one have; its own where `maximum` is a function."""
    blueprint = _without_name(without_tensors(weight))
    made = LinearMeaning(blueprint, activations, maximum)
    return made if callable(maximum) else _KNOWN.setdefault(made.key, made)


def _without_name(weight: Weight) -> Weight:
    held = {each.name: getattr(weight, each.name) for each in fields(weight)}
    layer = replace(weight.layer, name="")
    return type(weight).unchecked(
        weight.config, layer, {n: held[n] for n in held.keys() - {"config", "layer"}}
    )


def key_of(weight: Weight, activations: Activations, maximum: Maximum) -> str:
    """A few words and a digest of all that a layer is but its name; the same in every process."""
    layer, (N, K) = replace(weight.layer, name=""), weight.shape
    tensors = [(name, tuple(each.shape), str(each.dtype)) for name, each in weight.fields().items()]
    kind = type(weight)
    facts = kind.__module__, kind.__qualname__, weight.config, layer, tensors, activations, maximum
    return f"{weight.format} {N} x {K} {sha256(repr(facts).encode()).hexdigest()[:24]}"
