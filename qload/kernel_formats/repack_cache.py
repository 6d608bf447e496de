"""GPTQ layers that are alike: what the first took to repack is found once, and carried out for the next.

A model has hundreds of layers of a few shapes. Where their groups lie in order and all zero points are in the
middle, codes and scales are moved from one order to another and nothing else is left to be decided.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.formats import GPTQWeight
from qload.kernel_formats import gptq
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.panels import PanelsWeight
from qload.kernel_formats.plain_integers import Origin
from qload.layouts import Order, Packing, marlin, panels
from qload.layouts import gptq as gptq_layout
from qload.sentences import Digit, strides
from qload.sentences.strided_digits import axis_digits, holds_whole_codes, in_common
from qload.spec import Weight
from qload.spec.weight import tensor_names

MOST = 64  # kinds of layers that are remembered; a hostile checkpoint may have no two layers alike
LARGE = (
    48 << 20
)  # bytes of codes, of which a second copy is not made: what is found once is nothing beside them
MOVED = ("qweight", "scales")
RUN = 1 << 15  # words of eight bytes that are compared at once, in a cache


@dataclass(frozen=True)
class Move:
    """From a tensor of one shape to a tensor of another: the digits of all elements of `bits` bits."""

    bits: int
    digits: tuple[Digit, ...]
    shape: tuple[int, ...]


LateMove = Callable[[Tensor, Move], Tensor | None]  # of a tensor that was not read yet, what it becomes
LateMoves = Mapping[str, LateMove]  # of the tensors of a weight that was read without them
READ: LateMoves = {}  # of a weight that was read whole


@dataclass(frozen=True)
class Recipe:
    """What all layers of a kind become, and the moves that make their tensors."""

    weight_type: type[Weight]
    config: Any
    origin: Origin
    moves: Mapping[str, Move]

    def follow(self, weight: GPTQWeight, late: LateMoves = READ) -> Weight | None:
        """The weight as the first of its kind was repacked; None where its device has no routine for it.

        `late`: what moves the tensors that the weight itself does not hold.
        """
        tensors: dict[str, Tensor | None] = dict.fromkeys(tensor_names(self.weight_type))
        for name, move in self.moves.items():
            tensors[name] = late.get(name, _moved)(getattr(weight, name), move)
            if tensors[name] is None:
                return None
        layer = weight.layer.with_origin(self.origin, None)
        return self.weight_type.unchecked(self.config, layer, tensors)


def _moved(source: Tensor, move: Move) -> Tensor | None:
    """A new tensor; None where the device has no routine for it."""
    target = devices.writable(source, move.shape, source.dtype, None)
    return target if devices.move_digits(source, target, move.bits, move.digits) else None


@dataclass(frozen=True)
class Unproven:
    """A recipe that was derived from a layer, beside what that layer was and has become."""

    recipe: Recipe
    weight: GPTQWeight
    made: Weight

    def proven(self) -> Recipe | None:
        """The recipe, if it makes the same of the layer; else None."""
        if not all(map(_is_whole, self.weight.fields().values())):
            return None
        again, made = self.recipe.follow(self.weight), self.made
        if again is None or again.layer != made.layer:
            return None
        same = all(_same_bits(tensor, again.fields()[name]) for name, tensor in made.fields().items())
        return self.recipe if same else None


class AlikeLayers:
    """Recipes by kind: what a layer's config, layout, sizes and tensors have to be for one to hold.

    A recipe is proven before the next layer of its kind is made by it, which is when threads may already move
    that one. Until then the layer is kept, with what it has become: one at most, and not after `settle`.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Recipe | None] = {}
        self._unproven: dict[Any, Unproven] = {}  # of the kind that was learnt last

    def repack(self, weight: Weight, layout: str, late: LateMoves = READ) -> Weight | None:
        """A weight that a loader read just now, as one like it was repacked; None where none is known.

        `late`: what moves the tensors that the weight was read without.
        """
        if type(weight) is not GPTQWeight:
            return None
        kind = _kind(weight, layout)
        if kind in self._unproven:
            self._prove()
        recipe = self._known.get(kind)
        held = (getattr(weight, name) for name in MOVED if name not in late)
        if recipe is None or not all(tensor.is_contiguous() for tensor in held):
            return None
        return recipe.follow(weight, late) if gptq.is_middle(weight) else None

    def moves(self, weight: Weight, layout: str) -> Mapping[str, Move] | None:
        """How the tensors of a weight like this one would move; None where it is made otherwise."""
        kind = _kind(weight, layout) if type(weight) is GPTQWeight else None
        unproven = self._unproven.get(kind)
        recipe = self._known.get(kind) if unproven is None else unproven.recipe
        return None if recipe is None else recipe.moves

    def learn(self, weight: Weight, layout: str, made: Weight) -> None:
        """Remember what `weight` has become, where the next one like it becomes that by moves alone."""
        if type(weight) is not GPTQWeight or len(self._known) >= MOST or weight.qweight.nbytes > LARGE:
            return
        kind = _kind(weight, layout)
        if kind in self._known or kind in self._unproven:
            return
        self._prove()
        recipe = _recipe(weight, made)
        if recipe is None:
            self._known[kind] = None
        else:
            self._unproven[kind] = Unproven(recipe, weight, made)

    @property
    def keeps(self) -> bool:
        """Whether a layer is kept."""
        return bool(self._unproven)

    def settle(self, prove: bool) -> None:
        """Keep no layer any more: find out whether the recipe that was learnt last holds, or forget it."""
        if prove:
            self._prove()
        self._unproven.clear()

    def _prove(self) -> None:
        """Find out whether the recipe that was learnt last holds."""
        for kind, unproven in list(self._unproven.items()):
            self._known[kind] = unproven.proven()
            self._unproven.pop(kind, None)


def _kind(weight: GPTQWeight, layout: str) -> Any:
    """All that decides but for values; what configs leave out of comparisons goes into a weight's origin."""
    config, layer = weight.config, weight.layer
    unseen = config.desc_act, config.indexed, config.claimed_bits
    lie = [(tensor.dtype, tensor.shape) for tensor in weight.fields().values()]
    share = layer.parts, layer.K, layer.whole, layer.origin is None, layer.activations is None
    return layout, config, *unseen, *share, weight.device, weight.g_idx is None, *lie


def _recipe(weight: GPTQWeight, made: Weight) -> Recipe | None:
    """How a weight was made; None where more was decided than a kind tells."""
    layer, in_order = weight.layer, weight.scales.shape[0] == 1 or gptq.is_ordered(weight)
    if not (in_order and layer.origin is None and layer.activations is None):
        return None
    if not isinstance(made, GPTQMarlinWeight | PanelsWeight):
        return None
    copies = made.config.copies if isinstance(made, GPTQMarlinWeight) else 1
    origin, exact = made.layer.origin, made.padded_shape == made.shape and copies == 1
    if not (exact and tuple(made.fields()) == MOVED and isinstance(origin, Origin)):
        return None
    moves = _moves(weight, made)
    return None if moves is None else Recipe(type(made), made.config, origin, moves)


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor still has the memory that it says: who owns it may have given that back."""
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return 0 in tensor.shape or tensor.untyped_storage().nbytes() >= (last + 1) * tensor.itemsize


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal: eight bytes at once, which takes half of the time."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device) or not _is_whole(one):
        return False
    words = [each.flatten().view(torch.int64) for each in (one, other)]
    runs = zip(
        *(torch.split(each, RUN) for each in words), strict=True
    )  # each by this thread, as others have work
    return (
        all(torch.equal(here, there) for here, there in runs)
        if one.device.type == "cpu"
        else torch.equal(*words)
    )


def _orders(made: GPTQMarlinWeight | PanelsWeight) -> tuple[Packing, Order]:
    """Of codes and of scales."""
    if isinstance(made, PanelsWeight):
        return panels.rows(made.config.stored_bits), panels.SCALES
    return made.order(made.config.bits), marlin.scales(made.scales.shape[0])


def _moves(weight: GPTQWeight, made: GPTQMarlinWeight | PanelsWeight) -> Mapping[str, Move] | None:
    """Of codes and of scales; None where codes are not moved whole."""
    bits = weight.config.bits
    here, (there, scale_order) = gptq_layout.rows(bits), _orders(made)
    if not (holds_whole_codes(here) and holds_whole_codes(there)):
        return None
    shape = here.shape_of_codes(weight.qweight.shape)
    codes = in_common(axis_digits(here.codes, shape), axis_digits(there.codes, shape))
    if codes is None:
        return None
    scales = _digits(scale_order, weight.scales, made.scales)
    return {
        "qweight": Move(bits, tuple(codes), tuple(made.qweight.shape)),
        "scales": Move(8 * weight.scales.itemsize, tuple(scales), tuple(made.scales.shape)),
    }


def _digits(order: Order, source: Tensor, target: Tensor) -> list[Digit]:
    size = order.digits(tuple(source.shape), order.left)
    here, there = strides(order.left, size, source.stride()), strides(order.right, size, target.stride())
    return [Digit(size[digit], here[digit], there[digit]) for digit in size]
