"""The parameters of a rank's share of a layer, as the declarations of its formats say them.

A tensor that is cut along an axis has the share's size there, and the tags by which the loaders of engines
cut (`input_dim`, `output_dim`, `packed_dim`, `packed_factor`, `input_dim_whole`). Facts are whole, and so is
whatever falls between two ranks' groups: a layer is described by them before it is cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from qload.loader import ConfiguredFormat, LayerDescription, Part
from qload.loader.cuts import share
from qload.methods.placement import Placement
from qload.spec import PARTS, Axis, FieldNames, Grouped, Role, TensorSpec, named


@dataclass(frozen=True)
class ParameterSlot:
    """Where one tensor of a layer goes.

    Attributes
    ----------
    suffix
        What follows the layer's prefix in the checkpoint.
    spec
        Its declaration.
    shape
        Of this rank's share, all parts together; None: only the tensor itself tells, and it is kept whole.
    whole_inputs
        The axes that follow K and are not cut with it.
    dtype
        Of the parameter before a tensor is loaded into it, which may have another.
    is_codes
        Whether these are the layer's codes, by whose values nothing is decided, and which are large.
    """

    suffix: str
    spec: TensorSpec
    shape: tuple[int, ...] | None
    whole_inputs: frozenset[int]
    dtype: torch.dtype
    is_codes: bool

    @property
    def param_name(self) -> str:
        """The parameter's name: the suffix, without the dots that a parameter's name cannot have."""
        return self.suffix.replace(".", "_")

    @property
    def join(self) -> int | None:
        """The axis along which parts lie one after another."""
        axes = enumerate(self.spec.axes)
        return next((i for i, axis in axes if axis.dim in ("N", PARTS)), None)

    def extent(self, place: Placement, part: int) -> int:
        """How many entries of the joined axis a part has here."""
        axis = self.spec.axes[self.join or 0]
        return 1 if axis.dim == PARTS else axis.size(place.parts[part]) or 0

    def tags(self, place: Placement) -> dict[str, Any]:
        """What the loaders of engines cut by."""
        tags: dict[str, Any] = {}
        for i, axis in enumerate(self.spec.axes if self.shape is not None else ()):
            if axis.dim == "N":
                tags["output_dim"] = i
            elif axis.dim == "K" and i not in self.whole_inputs:
                tags |= {"input_dim": i, "input_dim_whole": axis.size(place.whole[1])}
            elif axis.dim == PARTS:
                tags["needs_scalar_to_array"] = True
            codes = 1 / axis.factor
            if axis.dim in ("N", "K") and self.spec.role is Role.WORD and codes != 1:
                whole = codes.denominator == 1
                tags |= {"packed_dim": i, "packed_factor": int(codes) if whole else codes}
        return tags


def slots(
    formats: Sequence[ConfiguredFormat], place: Placement, params_dtype: torch.dtype, *, by_tags: bool
) -> dict[str, ParameterSlot]:
    """Every tensor that a layer of these formats may have, by its suffix.

    `by_tags`: an engine cuts the tensors, so that groups are cut with K unless the config says act order.
    """
    found: dict[str, ParameterSlot] = {}
    for fmt in formats:
        config = _as_claimed(fmt.config, place.whole[1])
        for number, spec in enumerate(fmt.weight_type.tensors(config)):
            claimed = getattr(config, "desc_act", None) or getattr(config, "act_order", None)
            uncut = _whole_inputs(spec, place, with_groups=not by_tags or bool(claimed))
            shape = _shape(spec, config, place, uncut)
            for suffix in spec.suffixes:
                dtype = _first_dtype(spec, config, params_dtype)
                found.setdefault(suffix, ParameterSlot(suffix, spec, shape, uncut, dtype, number == 0))
    return found


def check_cuts(fmt: ConfiguredFormat, place: Placement) -> None:
    """The world's cuts of such a layer are lawful, or CutError or DivideError, the same on every rank.

    Each part is cut by itself: parts that one weight cannot hold together are several weights.
    """
    config = _known(fmt.config, place.whole[1])
    specs = tuple(spec for spec in fmt.weight_type.tensors(config) if not spec.optional)
    split, world = place.split, place.group.size()
    for name, width in zip(place.names, place.parts, strict=True):
        N = width * world if split == "N" else width
        names = _SuffixNames(name, MappingProxyType({spec.name: spec.suffix for spec in specs}))
        sizes = {"N": N, "K": place.whole[1], PARTS: 1}
        layer = LayerDescription(name, fmt, specs, sizes, {}, {}, names)
        share(layer, Part(name), split, place.group)


@dataclass(frozen=True)
class _SuffixNames(FieldNames):
    suffixes: Mapping[str, str]

    def full(self, field: str) -> str:
        """As the checkpoint names it."""
        return named(self.prefix, self.suffixes[field])


def _as_claimed(config: Any, K: int) -> Any:
    """A config as its layers are where its claims are true: groups lie in order unless it says otherwise."""
    config = _known(config, K)
    settable = {field.name for field in fields(config)}
    in_order = "positional" in settable and not config.desc_act and 0 < config.group_size < K
    return replace(config, positional=True) if in_order else config


def _known(config: Any, K: int) -> Any:
    """A config for layers of K inputs, of which one group may cover all."""
    return config.one_group(K) if isinstance(config, Grouped) else config


def _whole_inputs(spec: TensorSpec, place: Placement, *, with_groups: bool) -> frozenset[int]:
    def stays(axis: Axis) -> bool:
        exact = place.K % axis.granule == 0
        return spec.fact or (axis.free is not None and (with_groups or not exact))

    if place.split != "K":
        return frozenset()
    return frozenset(i for i, axis in enumerate(spec.axes) if axis.dim == "K" and stays(axis))


def _shape(spec: TensorSpec, config: Any, place: Placement, uncut: frozenset[int]) -> tuple[int, ...] | None:
    """This rank's share of a tensor, or None where a declaration does not tell it."""
    if spec.view is not None and any(axis.ops for axis in spec.places):
        return None  # it hides the axes along which it is cut
    sizes = []
    for i, axis in enumerate(spec.axes):
        if axis.dim == PARTS:
            size: int | None = len(place.parts)
        elif axis.dim == "N":
            each = [axis.size(width) for width in place.parts]
            size = None if None in each else sum(filter(None, each))
        elif axis.dim == "K":
            size = axis.size(place.whole[1] if i in uncut else place.K)
        elif axis.dim == "G" and isinstance(config, Grouped) and config.group_size:
            size = config.groups(place.whole[1])
        else:
            size = int(axis.dim) if axis.dim.isdigit() and not axis.ops else None
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)


def _first_dtype(spec: TensorSpec, config: Any, params_dtype: torch.dtype) -> torch.dtype:
    """What engines expect: scales of groups as the activations, all others as wide as there are."""
    narrow = spec.role is Role.FLOAT or isinstance(config, Grouped)
    wanted = params_dtype if narrow else torch.float32
    return next((dtype for dtype in (wanted, params_dtype) if dtype in spec.dtypes), spec.dtypes[0])
