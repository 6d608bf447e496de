"""Cache of repacks: the first layer of a kind gives the moves by which all other layers of it are repacked.

A model has hundreds of layers of a few shapes. If groups are in order and all zero points are 2**(bits - 1),
a repack moves codes and scales from one order to another and decides nothing else. A move is described by the
digits of positions (`qload.sentences`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from qload import devices
from qload.formats import GPTQWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.panels import PanelsWeight
from qload.layouts import gptq as gptq_layout
from qload.layouts import marlin, panels
from qload.sentences import Digit, strides
from qload.sentences.strided_digits import axis_digits, holds_whole_codes, in_common
from qload.spec import Weight
from qload.spec.integers import Origin
from qload.spec.weight import tensor_names

MAX_KINDS = 64  # bounds the memory for a hostile checkpoint without two similar layers
MAX_CODE_BYTES = 48 << 20  # larger layers gain nothing from the cache, and a second copy would cost memory
MOVED_TENSORS = ("qweight", "scales")
COMPARED_WORDS = 1 << 15  # int64 words per comparison, within a CPU cache


@dataclass(frozen=True)
class Move:
    """Move of all elements of `bits` bits from one tensor to a new one of `shape`, described by digits."""

    bits: int
    digits: tuple[Digit, ...]
    shape: tuple[int, ...]

    def fills(self, tensor: Tensor) -> bool:
        """Return whether the moved elements fill a tensor; new memory may hold the right values by chance."""
        return prod(digit.size for digit in self.digits) * self.bits == 8 * tensor.nbytes


DeferredMove = Callable[[Tensor, Move], Tensor | None]  # moves a tensor straight from its file
DeferredMoves = Mapping[str, DeferredMove]  # by the name of the tensor, for weights loaded without it
NOTHING_DEFERRED: DeferredMoves = {}
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class RepackRecipe:
    """Type, config, origin and moves of the repack of all layers of a kind."""

    weight_type: type[Weight]
    config: Any
    origin: Origin
    moves: Mapping[str, Move]

    def apply(self, weight: GPTQWeight, deferred: DeferredMoves = NOTHING_DEFERRED) -> Weight | None:
        """Repack a weight; None if its device has no native move.

        `deferred`: moves of the tensors that the weight was loaded without.
        """
        tensors: dict[str, Tensor | None] = dict.fromkeys(tensor_names(self.weight_type))
        for name, move in self.moves.items():
            tensors[name] = deferred.get(name, _move_tensor)(getattr(weight, name), move)
            if tensors[name] is None:
                return None
        layer = weight.layer.with_origin(self.origin, None)
        return self.weight_type.unchecked(self.config, layer, tensors)


def _move_tensor(source: Tensor, move: Move) -> Tensor | None:
    """Move to a new tensor; None if the device has no native move."""
    target = devices.writable(source, move.shape, source.dtype, None)
    return target if devices.move_digits(source, target, move.bits, move.digits) else None


@dataclass(frozen=True)
class UnprovenRecipe:
    """A recipe with the layer it was derived from, before and after the repack."""

    recipe: RepackRecipe
    weight: GPTQWeight
    repacked: Weight

    def is_right(self) -> bool:
        """Apply the recipe to the layer, and return True if the result is equal."""
        if not all(map(_has_memory, self.weight.fields().values())):
            return False
        fields = self.repacked.fields()
        if not all(move.fills(fields[name]) for name, move in self.recipe.moves.items()):
            return False
        result, repacked = self.recipe.apply(self.weight), self.repacked
        if result is None or result.layer != repacked.layer:
            return False
        return all(_equal_bits(tensor, result.fields()[name]) for name, tensor in fields.items())


class RepackCache:
    """Recipes by kind: the config, layout, sizes and tensors that a layer needs for a recipe to apply.

    A recipe is proven when the second layer of its kind arrives; threads may already move the tensors of that
    layer. Until then the first layer is kept in memory: at most one, and none after `drop_unproven`.
    """

    def __init__(self) -> None:
        self._recipes: dict[Any, RepackRecipe | None] = {}
        self._unproven: dict[Any, UnprovenRecipe] = {}

    def repack(
        self, weight: Weight, layout: str, deferred: DeferredMoves = NOTHING_DEFERRED
    ) -> Weight | None:
        """Repack a weight fresh from its loader by the recipe of its kind; None if there is none.

        `deferred`: moves of the tensors that the weight was loaded without.
        """
        if type(weight) is not GPTQWeight:
            return None
        kind = _find_kind(weight, layout)
        if kind in self._unproven:
            self._prove()
        recipe = self._recipes.get(kind)
        if recipe is None or not weight.is_symmetric():
            return None
        for name in MOVED_TENSORS:
            if name not in deferred and not getattr(weight, name).is_contiguous():
                return None
        return recipe.apply(weight, deferred)

    def repack_stack(
        self, weight: Weight, layout: str, repacked: Weight, stored: Tensors, rows: Tensors
    ) -> bool:
        """Repack tensors (E, ...) of layers of one kind straight to `rows` of a stack, by its recipe.

        `weight`: one of the layers as `stored`; `repacked`: a layer of the stack. False, perhaps after a
        write, if the recipe does not repack them.
        """
        if type(weight) is not GPTQWeight:
            return False
        recipe, made = self._recipes.get(_find_kind(weight, layout)), (type(repacked), repacked.config)
        if recipe is None or (*made, repacked.layer.origin) != (
            recipe.weight_type,
            recipe.config,
            recipe.origin,
        ):
            return False
        if not weight.holding(stored).is_symmetric():
            return False
        for name, move in recipe.moves.items():
            source, target = stored[name], rows[name]
            sizes = [8 * tensor[0].nbytes // move.bits for tensor in (source, target)]
            digits = Digit(len(source), *sizes), *move.digits
            contiguous = source.is_contiguous() and target.is_contiguous()
            if not contiguous or not devices.move_digits(source, target, move.bits, digits):
                return False
        return True

    def record(self, weight: Weight, layout: str, repacked: Weight) -> None:
        """Derive and keep the recipe of a repack, if moves alone can repeat it."""
        if type(weight) is not GPTQWeight or weight.qweight.nbytes > MAX_CODE_BYTES:
            return
        kind = _find_kind(weight, layout)
        if kind in self._recipes or kind in self._unproven or len(self._recipes) >= MAX_KINDS:
            return
        self._prove()
        recipe = _derive_recipe(weight, repacked)
        if recipe is None:
            self._recipes[kind] = None
        else:
            self._unproven[kind] = UnprovenRecipe(recipe, weight, repacked)

    def moves(self, weight: Weight, layout: str) -> Mapping[str, Move] | None:
        """Return the moves for tensors of a weight of this kind; None if there is no recipe."""
        kind = _find_kind(weight, layout) if type(weight) is GPTQWeight else None
        unproven = self._unproven.get(kind)
        recipe = self._recipes.get(kind) if unproven is None else unproven.recipe
        return None if recipe is None else recipe.moves

    @property
    def has_unproven(self) -> bool:
        """True if a layer is kept in memory."""
        return bool(self._unproven)

    def drop_unproven(self, prove: bool) -> None:
        """Release the layer kept in memory, after a proof of its recipe or with its recipe."""
        if prove:
            self._prove()
        self._unproven.clear()

    def _prove(self) -> None:
        for kind, unproven in list(self._unproven.items()):
            self._recipes[kind] = unproven.recipe if unproven.is_right() else None
            self._unproven.pop(kind, None)


def _find_kind(weight: GPTQWeight, layout: str) -> Any:
    """Return the key of a layer: everything that decides a repack except values.

    It includes config fields that comparisons ignore, because the origin of the result contains them.
    """
    config, layer = weight.config, weight.layer
    ignored = config.desc_act, config.indexed, config.claimed_bits
    stored = weight.qweight, weight.qzeros, weight.scales, weight.g_idx
    tensors = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in stored]
    share = layer.parts, layer.K, layer.whole, layer.origin is None, layer.activations is None
    return layout, config, *ignored, *share, weight.qweight.device, *tensors


def _derive_recipe(weight: GPTQWeight, repacked: Weight) -> RepackRecipe | None:
    """Return the recipe of a repack; None if it depends on more than the kind."""
    layer, in_order = weight.layer, weight.scales.shape[0] == 1 or weight.has_ordered_groups()
    if not (in_order and layer.origin is None and layer.activations is None):
        return None
    if not isinstance(repacked, GPTQMarlinWeight | PanelsWeight):
        return None
    if isinstance(repacked, PanelsWeight):
        copies, stored_bits = 1, repacked.config.stored_bits
    else:
        copies, stored_bits = repacked.config.copies, repacked.config.bits
    if stored_bits != weight.config.bits:  # codes are not only moved
        return None
    origin, exact = repacked.layer.origin, repacked.padded_shape == repacked.shape and copies == 1
    if not (exact and tuple(repacked.fields()) == MOVED_TENSORS and isinstance(origin, Origin)):
        return None
    moves = _derive_moves(weight, repacked)
    return None if moves is None else RepackRecipe(type(repacked), repacked.config, origin, moves)


def _derive_moves(weight: GPTQWeight, repacked: GPTQMarlinWeight | PanelsWeight) -> Mapping[str, Move] | None:
    """Return the moves of codes and scales; None if a code is stored in several pieces."""
    bits, source = weight.config.bits, gptq_layout.rows(weight.config.bits)
    if isinstance(repacked, PanelsWeight):
        target, scale_order = panels.rows(repacked.config.stored_bits), panels.SCALES
    else:
        target, scale_order = repacked.order(bits), marlin.scales(repacked.scales.shape[0])
    if not (holds_whole_codes(source) and holds_whole_codes(target)):
        return None
    shape = source.shape_of_codes(weight.qweight.shape)
    codes = in_common(axis_digits(source.codes, shape), axis_digits(target.codes, shape))
    if codes is None:
        return None
    size = scale_order.digits(tuple(weight.scales.shape), scale_order.left)
    before = strides(scale_order.left, size, weight.scales.stride())
    after = strides(scale_order.right, size, repacked.scales.stride())
    scales = tuple(Digit(size[digit], before[digit], after[digit]) for digit in size)
    return {
        "qweight": Move(bits, tuple(codes), tuple(repacked.qweight.shape)),
        "scales": Move(8 * weight.scales.itemsize, scales, tuple(repacked.scales.shape)),
    }


def _has_memory(tensor: Tensor) -> bool:
    """Return True if the storage covers the tensor; its owner may have freed the memory."""
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return 0 in tensor.shape or tensor.untyped_storage().nbytes() >= (last + 1) * tensor.itemsize


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors as int64 words, in half the time of a comparison by element."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if not _has_memory(one):
        return False
    words = [tensor.flatten().view(torch.int64) for tensor in (one, other)]
    if one.device.type != "cpu":
        return torch.equal(*words)
    blocks = (torch.split(each, COMPARED_WORDS) for each in words)  # small blocks stay on this thread
    return all(torch.equal(first, second) for first, second in zip(*blocks, strict=True))
