"""Parameters that an engine fills tensor by tensor, and a buffer that reads them as a storage.

An engine loads one tensor after another, before it is known which layer they form. A rank keeps its share of
the codes, which are large, under the shape of the whole tensor, and all of every other tensor: the loader of
all formats then describes the layer, checks the cuts of all ranks and reads this rank's share, as from files.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from qload.dtypes import STORED, TORCH
from qload.errors import ArgumentError, DivideError, MismatchError, ShapeError
from qload.loader import ConfiguredFormat, LayerDescription, Part, Split
from qload.loader.exclusion import parts as parts_of
from qload.loader.sharding import share
from qload.methods.parameters import check_tensor, is_empty
from qload.parallel import ALONE, ProcessGroup, Rank
from qload.spec import PARTS, Axis, FieldNames, Grouped, Role, TensorSpec, is_appended, named
from qload.storage import TensorInfo
from qload.storage.protocol import bounds, missing

QKV = ("q", "k", "v")  # shard ids of engines for the parts 0, 1 and 2 of a layer of three


@dataclass(frozen=True)
class LayerShare:
    """Share of a layer on one rank.

    Attributes
    ----------
    prefix
        Name of the layer.
    names
        Names of its parts in the checkpoint; the prefix for a layer of one part.
    ids
        Shard ids of the parts.
    parts
        This rank's outputs of each part.
    K
        This rank's inputs.
    whole
        (N, K) of the whole layer, as given by the engine.
    group
        This rank in its world; rank 0 if the module does not give it.
    has_rank
        Whether the module gives the rank.
    """

    prefix: str
    names: tuple[str, ...]
    ids: tuple[int | str, ...]
    parts: tuple[int, ...]
    K: int
    whole: tuple[int, int]
    group: ProcessGroup
    has_rank: bool

    @classmethod
    def from_layer(
        cls, layer: nn.Module, sizes: tuple[int, Sequence[int]], whole: tuple[int, int], prefix: str
    ) -> "LayerShare":
        """Create the share (K, outputs of each part) of a module, of a `whole` layer (N, K).

        ArgumentError for invalid sizes; DivideError if no number of ranks has such a share.
        """
        K, parts = sizes[0], tuple(sizes[1])
        if not parts or not all(type(size) is int and size > 0 for size in (K, *parts, *whole)):
            raise ArgumentError("output_partition_sizes", "sizes of at least 1", repr(sizes[1]))
        if whole[1] < K or sum(parts) > whole[0]:
            raise ArgumentError(
                "input_size_per_partition, output_partition_sizes",
                f"at most the whole layer (N, K) = {whole}",
                f"{(sum(parts), K)}",
            )
        shards = getattr(layer, "shards", ())
        ids = tuple(shard.id for shard in shards) if len(shards) == len(parts) else tuple(range(len(parts)))
        names = parts_of(prefix)
        if len(parts) == 1:
            names = [prefix]
        elif len(names) != len(parts):
            names = [f"{prefix}.{i}" if prefix else f"{i}" for i in ids]
        own = _group_of(layer)
        group = _group_by_sizes(prefix, (K, sum(parts)), whole) if own is None else own
        return cls(prefix, tuple(names), ids, parts, K, whole, group, own is not None)

    @property
    def split(self) -> Split | None:
        """Dimension along which the ranks share the layer."""
        if self.whole[1] > self.K:
            return "K"
        return "N" if sum(self.parts) < self.whole[0] else None

    def part_number(self, shard_id: object, tensor: str) -> int:
        """Return the number of the part with a shard id; ArgumentError for an unknown id."""
        known = [*self.ids, *(QKV if self.ids == (0, 1, 2) else ())]
        for number, known_id in enumerate(known):
            if type(known_id) is type(shard_id) and known_id == shard_id:
                return number % len(self.parts)
        listed = ", ".join(map(repr, known))
        raise ArgumentError(f"{tensor}: shard_id", f"None or one of {listed}", repr(shard_id))

    def separate_parts(self, shapes: Sequence[tuple[int, int]]) -> list[Part]:
        """Return the load of parts stored with these shapes (N, K); ShapeError for other shapes."""
        return [
            Part(name, copies=self._copies(name, width, shape))
            for name, width, shape in zip(self.names, self.parts, shapes, strict=True)
        ]

    def joined_parts(self, shape: tuple[int, int]) -> list[Part]:
        """Return the load of parts stored in one tensor (N, K); ShapeError for another shape."""
        world = self.group.size() if self.split == "N" else 1
        first, *rest = (width * world for width in self.parts)
        copies = sum(rest) // (shape[0] - first) if first < shape[0] and rest else 1
        parts, start = [], 0
        for width, size in zip(self.parts, [first, *(size // max(copies, 1) for size in rest)], strict=True):
            part_copies = self._copies(self.prefix, width, (size, shape[1]))
            parts.append(Part(self.prefix, start, start + size, part_copies))
            start += size
        if start != shape[0]:
            raise ShapeError(self.prefix, f"{(start, self.whole[1])} = (N, K)", shape)
        return parts

    def _copies(self, name: str, width: int, shape: tuple[int, int]) -> int:
        """Return the number of ranks with the same outputs of a part, stored with a shape (N, K)."""
        world = self.group.size() if self.split == "N" else 1
        ranks, rest = divmod(shape[0], width)
        if rest or not ranks or world % ranks or shape[1] != self.whole[1]:
            raise ShapeError(name, f"{(width * world, self.whole[1])} = (N, K)", shape)
        return world // ranks


def _group_of(layer: Any) -> ProcessGroup | None:
    """Return the rank of a module: qload's have a process group, modules of engines two numbers."""
    group = getattr(layer, "process_group", None)
    if isinstance(group, ProcessGroup):
        return group
    rank, size = getattr(layer, "tp_rank", None), getattr(layer, "tp_size", None)
    return Rank(rank, size) if type(rank) is int and type(size) is int else None


def _group_by_sizes(prefix: str, share_shape: tuple[int, int], whole: tuple[int, int]) -> ProcessGroup:
    """Return rank 0 of as many ranks as there are shares (K, N) in the whole (N, K)."""
    K, N = share_shape
    for dim, width, size in (("K", K, whole[1]), ("N", N, whole[0])):
        if width < size:
            if size % width:
                raise DivideError(prefix or "layer", dim, size, f"shares of {width}")
            return Rank(0, size // width)
    return ALONE


@dataclass(frozen=True)
class ParameterSlot:
    """Parameter for one tensor that a layer may have.

    Attributes
    ----------
    suffix
        Suffix of the tensor's name, after the layer's prefix.
    spec
        Declaration of the tensor.
    shape
        Shape of this rank's share, all parts together. None: known from the tensor alone, which is kept
        whole.
    whole_inputs
        Axes along K that are not cut with it.
    dtype
        Dtype of the empty parameter; a loaded tensor may have another.
    is_codes
        Whether the tensor has the layer's codes, which are large and decide nothing about the layer.
    """

    suffix: str
    spec: TensorSpec
    shape: tuple[int, ...] | None
    whole_inputs: frozenset[int]
    dtype: torch.dtype
    is_codes: bool

    @property
    def param_name(self) -> str:
        """Name of the parameter: the suffix, with `_` for dots."""
        return self.suffix.replace(".", "_")

    @property
    def join(self) -> int | None:
        """Axis along which the parts are joined."""
        axes = enumerate(self.spec.axes)
        return next((i for i, axis in axes if axis.dim in ("N", PARTS)), None)

    def extent(self, width: int) -> int:
        """Return the size along the joined axis of a part with `width` outputs."""
        axis = self.spec.axes[self.join or 0]
        return 1 if axis.dim == PARTS else axis.size(width) or 0

    def attrs(self, layer: LayerShare) -> dict[str, Any]:
        """Return the attributes by which loaders of engines cut."""
        attrs: dict[str, Any] = {}
        for i, axis in enumerate(self.spec.axes if self.shape is not None else ()):
            if axis.dim == "N":
                attrs["output_dim"] = i
            elif axis.dim == "K" and i not in self.whole_inputs:
                attrs |= {"input_dim": i, "input_dim_whole": axis.size(layer.whole[1])}
            elif axis.dim == PARTS:
                attrs["needs_scalar_to_array"] = True
            codes = 1 / axis.factor
            if axis.dim in ("N", "K") and self.spec.role is Role.WORD and codes != 1:
                is_integer = codes.denominator == 1
                attrs |= {"packed_dim": i, "packed_factor": int(codes) if is_integer else codes}
        return attrs


def parameter_slots(
    formats: Sequence[ConfiguredFormat], layer: LayerShare, params_dtype: torch.dtype, *, by_attrs: bool
) -> dict[str, ParameterSlot]:
    """Return a slot for every tensor that a layer of these formats may have, by suffix.

    Facts are whole, and so is a tensor whose groups fall between two ranks: the layer is described before it
    is cut. `by_attrs`: an engine cuts the tensors by attributes; groups are cut with K unless the config
    claims act order.
    """
    slots: dict[str, ParameterSlot] = {}
    for fmt in formats:
        config = _config_as_claimed(fmt.config, layer.whole[1])
        act_order = bool(getattr(config, "desc_act", None) or getattr(config, "act_order", None))
        for number, spec in enumerate(fmt.specs_of(config)):
            uncut = _whole_inputs(spec, layer, with_groups=not by_attrs or act_order)
            shape, dtype = _share_shape(spec, config, layer, uncut), _empty_dtype(spec, config, params_dtype)
            for suffix in spec.suffixes:
                slots.setdefault(suffix, ParameterSlot(suffix, spec, shape, uncut, dtype, number == 0))
    return slots


def matrix_formats(formats: Sequence[ConfiguredFormat]) -> list[ConfiguredFormat]:
    """Return the formats of single layers, without those of stacks."""
    return [fmt for fmt in formats if not any(map(is_appended, fmt.suffixes))]


def check_cuts(formats: Sequence[ConfiguredFormat], layer: LayerShare) -> None:
    """Raise CutError or DivideError, the same on every rank, if the first quantized format cannot be cut.

    Each part is cut by itself: parts that do not fit into one weight become several weights.
    """
    fmt = next((fmt for fmt in formats if not fmt.weight_type.plain), formats[0])
    config = _config_for_inputs(fmt.config, layer.whole[1])
    specs = tuple(spec for spec in fmt.specs_of(config) if not spec.optional)
    suffixes = MappingProxyType({spec.name: spec.suffix for spec in specs})
    for name, width in zip(layer.names, layer.parts, strict=True):
        N = width * layer.group.size() if layer.split == "N" else width
        sizes = {"N": N, "K": layer.whole[1], PARTS: 1}
        described = LayerDescription(name, fmt, specs, sizes, {}, {}, _SuffixNames(name, suffixes))
        share(described, Part(name), layer.split, layer.group)


@dataclass(frozen=True)
class _SuffixNames(FieldNames):
    suffixes: Mapping[str, str]

    def full(self, field: str) -> str:
        """Return the tensor name of a field."""
        return named(self.prefix, self.suffixes[field])


def _config_as_claimed(config: Any, K: int) -> Any:
    """Return a config for K inputs, with groups in order unless it claims act order."""
    config = _config_for_inputs(config, K)
    settable = {field.name for field in fields(config)}
    in_order = "positional" in settable and not config.desc_act and 0 < config.group_size < K
    return replace(config, positional=True) if in_order else config


def _config_for_inputs(config: Any, K: int) -> Any:
    """Return a config for layers of K inputs, of one group if its size is at least K."""
    return config.one_group(K) if isinstance(config, Grouped) else config


def _whole_inputs(spec: TensorSpec, layer: LayerShare, *, with_groups: bool) -> frozenset[int]:
    """Return the axes along K that are not cut with it."""

    def is_whole(axis: Axis) -> bool:
        exact = layer.K % axis.granule == 0
        return spec.fact or (axis.free is not None and (with_groups or not exact))

    if layer.split != "K":
        return frozenset()
    return frozenset(i for i, axis in enumerate(spec.axes) if axis.dim == "K" and is_whole(axis))


def _share_shape(
    spec: TensorSpec, config: Any, layer: LayerShare, uncut: frozenset[int]
) -> tuple[int, ...] | None:
    """Return the shape of this rank's share of a tensor; None if the declaration leaves it open."""
    if spec.view is not None and (spec.packing is not None or any(axis.ops for axis in spec.places)):
        return None  # the axes of the cut are hidden
    sizes = []
    for i, axis in enumerate(spec.axes):
        if axis.dim == PARTS:
            size: int | None = len(layer.parts)
        elif axis.dim == "N":
            extents = [axis.size(width) for width in layer.parts]
            size = None if None in extents else sum(filter(None, extents))
        elif axis.dim == "K":
            size = axis.size(layer.whole[1] if i in uncut else layer.K)
        elif axis.dim == "G" and isinstance(config, Grouped) and config.group_size:
            size = config.groups(layer.whole[1])
        else:
            size = int(axis.dim) if axis.dim.isdigit() and not axis.ops else None
        if size is None:
            return None
        sizes.append(size)
    return tuple(sizes)


def _empty_dtype(spec: TensorSpec, config: Any, params_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that engines expect: scales of groups as activations, others as wide as possible."""
    narrow = spec.role is Role.FLOAT or isinstance(config, Grouped)
    preferred = params_dtype if narrow else torch.float32
    allowed = [TORCH[dtype] for dtype in spec.dtypes]
    return next((dtype for dtype in (preferred, params_dtype) if dtype in allowed), allowed[0])


@dataclass(frozen=True, eq=False)
class BufferedTensor:
    """Kept block of a tensor of the checkpoint.

    Attributes
    ----------
    shape
        Shape of the whole tensor.
    origin
        First index of the block along each axis.
    block
        Its values.
    in_param
        Whether they are in the parameter's memory.
    """

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    block: Tensor
    in_param: bool = False


class ParameterBuffer:
    """Storage of the tensors loaded into a layer's parameters, with a name for each part of a fused layer.

    Parameters
    ----------
    layer
        This rank's share of the layer.
    slots
        Parameters by suffix.
    """

    def __init__(self, layer: LayerShare, slots: Mapping[str, ParameterSlot]) -> None:
        self.layer, self.slots = layer, slots
        self.is_closed = False
        self.is_partial = False  # an engine has cut the tensors, or another rank's elements were requested
        self._tensors: dict[str, BufferedTensor] = {}

    def load(
        self, suffix: str, param: nn.Parameter, loaded_weight: Tensor, shard_id: int | str | None = None
    ) -> None:
        """Keep this rank's share of a tensor of the checkpoint, in the parameter if it has its shape.

        ArgumentError for an unknown shard id, a tensor without values, and a tensor loaded after the layer
        was finished.
        """
        layer, slot = self.layer, self.slots[suffix]
        name = named(layer.prefix, suffix)
        check_tensor(loaded_weight, name)
        if self.is_closed:
            raise ArgumentError(name, "a tensor loaded before process_weights_after_loading", "one after")
        if param.is_meta:
            raise ArgumentError(name, "a parameter with memory: to_empty before loading", "one on meta")
        loaded = loaded_weight.detach()
        if len(layer.parts) > 1 and shard_id is None:
            block = loaded.to(param.device, copy=True)
            self._tensors[name] = BufferedTensor(tuple(loaded.shape), (0,) * loaded.ndim, block)
            return
        part = layer.part_number(shard_id, name) if shard_id is not None else 0
        origin, cut = self._cut(slot, part, loaded)
        block = self._store(slot, part, param, cut)
        in_param = block.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
        in_param &= len(layer.parts) == 1 or slot.join is not None  # else the next part overwrites it
        stored_name = named(layer.names[part], suffix)
        self._tensors[stored_name] = BufferedTensor(tuple(loaded.shape), origin, block, in_param)

    def add_written(self, module: nn.Module) -> None:
        """Add the shares that an engine's own loader wrote into parameters of `module`, or assigned."""
        for suffix, slot in self.slots.items():
            param = getattr(module, slot.param_name, None)
            if not isinstance(param, nn.Parameter) or param.is_meta:
                continue
            self._update(slot, param.data)
            names = [named(name, suffix) for name in (self.layer.prefix, *self.layer.names)]
            if slot.shape is None or any(name in self._tensors for name in names):
                continue
            if slot.whole_inputs and not self.layer.has_rank:
                expected = "a layer that tells its rank: process_group, or tp_rank and tp_size"
                raise ArgumentError(names[0], f"{expected}, as it is whole on every rank", "none")
            for part, name in enumerate(names[1:]):
                block = self._part_of(slot, part, param.data)
                if not is_empty(block, name):
                    shape, origin = self._whole_shape(slot, part, block)
                    self._tensors[name] = BufferedTensor(shape, origin, block)
                    self.is_partial |= self.layer.split is not None

    def _update(self, slot: ParameterSlot, values: Tensor) -> None:
        """Point to a parameter's present memory, unless it was cast or resized."""
        for part, layer_name in enumerate(self.layer.names):
            name = named(layer_name, slot.suffix)
            tensor = self._tensors.get(name)
            if tensor is None or not tensor.in_param or tensor.block.dtype != values.dtype:
                continue
            block = self._part_of(slot, part, values)
            if block.numel() == tensor.block.numel():
                self._tensors[name] = replace(tensor, block=block.reshape(tensor.block.shape))

    def load_parts(self, shape: Any) -> list[Part]:
        """Return the load of the layer; `shape`: a function from a name to its stored (N, K).

        MismatchError if some tensors were loaded whole and some in parts.
        """
        layer = self.layer
        if len(layer.parts) == 1 or not any(
            named(layer.prefix, suffix) in self._tensors for suffix in self.slots
        ):
            return layer.separate_parts([shape(name) for name in layer.names])
        separate = [key for name in layer.names for key in self._tensors if key.startswith(f"{name}.")]
        if separate:
            expected, got = "all tensors under shard ids, or none", ", ".join(separate)
            raise MismatchError(layer.prefix, "loaded whole and in parts", expected, got)
        return layer.joined_parts(shape(layer.prefix))

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of the whole tensor `name`."""
        tensor = self._find(name)
        return TensorInfo(STORED[tensor.block.dtype], tensor.shape)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a view of the elements `index` of the tensor `name`; ArgumentError for another rank's."""
        tensor = self._find(name)
        pairs = bounds(name, tensor.shape, index)
        extents = [stop - start for start, stop in pairs]
        if 0 in extents:
            return tensor.block.new_empty(extents)
        local = [(a - offset, b - offset) for (a, b), offset in zip(pairs, tensor.origin, strict=True)]
        if any(a < 0 or b > size for (a, b), size in zip(local, tensor.block.shape, strict=True)):
            self.is_partial = True
            raise ArgumentError(name, f"{tuple(tensor.block.shape)} from {tensor.origin} on", repr(index))
        return tensor.block[tuple(slice(*pair) for pair in local)]

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """Return (start, stop) along each axis of the kept block of the tensor `name`."""
        tensor = self._find(name)
        if tensor.block.ndim != len(tensor.shape):
            return None
        sizes = zip(tensor.origin, tensor.block.shape, strict=False)
        return tuple((start, start + size) for start, size in sizes)

    def close(self) -> None:
        """Free all tensors, and refuse further ones."""
        self.is_closed = True
        self._tensors.clear()

    def _find(self, name: str) -> BufferedTensor:
        if name not in self._tensors:
            raise missing(name, self.keys())
        return self._tensors[name]

    def _cut(self, slot: ParameterSlot, part: int, loaded: Tensor) -> tuple[tuple[int, ...], Tensor]:
        """Return the origin and the values of this rank's share; the whole tensor if it is not codes."""
        axes, split = slot.spec.axes, self.layer.split
        origin = [0] * loaded.ndim
        is_cut = slot.is_codes and slot.shape is not None and len(axes) == loaded.ndim
        if not is_cut or split is None or not self.layer.has_rank:
            return tuple(origin), loaded
        for i, axis in enumerate(axes):
            if axis.dim == split and not axis.free:
                start, extent = self._cut_axis(axis, part, loaded.shape[i])
                loaded, origin[i] = loaded.narrow(i, start, extent), start
        return tuple(origin), loaded

    def _cut_axis(self, axis: Axis, part: int, size: int) -> tuple[int, int]:
        """Return (start, extent) of an equal share of a stored axis, or of all of it for unequal shares."""
        group = self.layer.group
        extent = axis.size(self.layer.parts[part] if axis.dim == "N" else self.layer.K) or 0
        ranks, rest = divmod(size, extent) if extent else (0, 1)
        if rest or not ranks or group.size() % ranks:
            return 0, size
        return group.rank() // (group.size() // ranks) * extent, extent

    def _store(self, slot: ParameterSlot, part: int, param: nn.Parameter, values: Tensor) -> Tensor:
        """Copy values into the parameter's memory if they fit, else into their own."""
        if slot.shape is None:
            return values.to(param.device, copy=True)
        is_joined = slot.join is not None and len(self.layer.parts) > 1
        shape = list(slot.shape)
        if is_joined:
            shape[slot.join or 0] = slot.extent(self.layer.parts[part])
        is_scalar = values.numel() == 1 and shape == [1]
        if list(values.shape) != shape and not is_scalar:
            return values.to(param.device, copy=True)
        if not is_joined:
            param.data = values.to(param.device, copy=True).reshape(shape).contiguous()
            return param.data.reshape(values.shape)
        if param.dtype != values.dtype or not param.data.is_contiguous():
            if any(named(name, slot.suffix) in self._tensors for name in self.layer.names):
                return values.to(param.device, copy=True)
            param.data = torch.empty(slot.shape, dtype=values.dtype, device=param.device)
        target = self._part_of(slot, part, param.data)
        target.copy_(values.reshape(shape))
        return target.reshape(values.shape)

    def _part_of(self, slot: ParameterSlot, part: int, values: Tensor) -> Tensor:
        """Return the block of one part of a parameter that has all parts."""
        if slot.join is None or len(self.layer.parts) == 1:
            return values
        *before, extent = (slot.extent(width) for width in self.layer.parts[: part + 1])
        return values.narrow(slot.join, sum(before), extent)

    def _whole_shape(
        self, slot: ParameterSlot, part: int, block: Tensor
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the whole tensor of a parameter's block, and the block's origin."""
        layer, shape, origin = self.layer, list(block.shape), [0] * block.ndim
        for i, axis in enumerate(slot.spec.axes):
            if axis.dim == layer.split and i not in slot.whole_inputs:
                N = layer.parts[part] * layer.group.size()
                shape[i] = axis.size(N if axis.dim == "N" else layer.whole[1]) or shape[i]
                origin[i] = layer.group.rank() * block.shape[i]
        return tuple(shape), tuple(origin)
