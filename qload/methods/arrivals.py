"""The tensors of a layer as they arrive, cut to what this rank will read, and read as a storage.

An engine hands over one tensor after another, before anybody can tell which layer they make. Of the codes,
which are large, a rank keeps its own share under the shape of the whole, and of all else the whole: so the
loader of all formats describes the layer, checks the cuts of the world and reads its share, as from files.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, MismatchError
from qload.methods.parameters import check_tensor, is_blank
from qload.methods.placement import Placement
from qload.methods.share_shapes import ParameterSlot
from qload.spec import PARTS, Axis, named
from qload.storage import TensorInfo
from qload.storage.protocol import bounds, missing


@dataclass(frozen=True)
class Arrived:
    """What is kept of a tensor: a rectangle of it, which begins at `origin`."""

    shape: tuple[int, ...]
    origin: tuple[int, ...]
    piece: Tensor
    in_param: bool = False  # whether it lies in the parameter's memory


class Arrivals:
    """A storage of what a layer's parameters were given, each part of a fused layer under a name of its own.

    Parameters
    ----------
    place
        The share that the layer holds.
    slots
        What may arrive, by suffix.
    """

    def __init__(self, place: Placement, slots: Mapping[str, ParameterSlot]) -> None:
        self.place, self.slots = place, slots
        self.is_closed = False
        self.is_share = False  # whether an engine cut, or more was asked for than this rank's share
        self._kept: dict[str, Arrived] = {}

    def take(self, suffix: str, param: nn.Parameter, loaded: Tensor, shard_id: int | str | None) -> None:
        """Keep this rank's share of a checkpoint's tensor, in the parameter where it has its shape.

        ArgumentError for a shard id that is none, a tensor without values, and after the layer was prepared.
        """
        place, slot = self.place, self.slots[suffix]
        full = named(place.prefix, suffix)
        check_tensor(loaded, full)
        if self.is_closed:
            raise ArgumentError(full, "a tensor loaded before process_weights_after_loading", "one after")
        if param.is_meta:
            raise ArgumentError(full, "a parameter with memory: to_empty before loading", "one on meta")
        if len(place.parts) > 1 and shard_id is None:
            whole = loaded.detach().to(param.device, copy=True)
            self._kept[full] = Arrived(tuple(loaded.shape), (0,) * loaded.ndim, whole)
            return
        part = place.part(shard_id, full) if shard_id is not None else 0
        origin, piece = self._cut(slot, part, loaded.detach())
        held = self._hold(slot, part, param, piece)
        inside = held.untyped_storage().data_ptr() == param.untyped_storage().data_ptr()
        inside &= len(place.parts) == 1 or slot.join is not None  # else it is overwritten by the next part
        self._kept[named(place.names[part], suffix)] = Arrived(tuple(loaded.shape), origin, held, inside)

    def find_written(self, layer: nn.Module) -> None:
        """Keep what an engine's own loader wrote into parameters, share by share, or put in their place."""
        for suffix, slot in self.slots.items():
            param = getattr(layer, slot.param_name, None)
            if isinstance(param, nn.Parameter) and not param.is_meta:
                self._look_again(slot, param.data)
            arrived = any(
                named(name, suffix) in self._kept for name in (self.place.prefix, *self.place.names)
            )
            if arrived or not isinstance(param, nn.Parameter) or slot.shape is None or param.is_meta:
                continue
            self._check_told(slot)
            for part, name in enumerate(self.place.names):
                piece, written = self._of_part(slot, part, param.data), named(name, suffix)
                if not is_blank(piece, written):
                    shape, origin = self._whole(slot, part, piece)
                    self._kept[written] = Arrived(shape, origin, piece)
                    self.is_share |= self.place.split is not None

    def _look_again(self, slot: ParameterSlot, now: Tensor) -> None:
        """What lies in a parameter's memory now, where a tensor does, unless it was cast or resized."""
        for part, name in enumerate(self.place.names):
            full = named(name, slot.suffix)
            kept = self._kept.get(full)
            if kept is None or not kept.in_param or kept.piece.dtype != now.dtype:
                continue
            piece = self._of_part(slot, part, now)
            if piece.numel() == kept.piece.numel():
                self._kept[full] = replace(kept, piece=piece.reshape(kept.piece.shape))

    def is_fused(self, prefix: str) -> bool:
        """Whether tensors came that have all parts one after another; MismatchError where some did."""
        own = (named(prefix, suffix) in self._kept for suffix in self.slots)
        if len(self.place.parts) == 1 or not any(own):
            return False
        parts = [key for name in self.place.names for key in self._kept if key.startswith(f"{name}.")]
        if parts:
            raise MismatchError(
                prefix, "loaded whole and in parts", "all tensors under shard ids, or none", ", ".join(parts)
            )
        return True

    def keys(self) -> Collection[str]:
        """The names of all tensors."""
        return self._kept.keys()

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of the whole tensor `name`."""
        kept = self._find(name)
        return TensorInfo(kept.piece.dtype, kept.shape)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The elements `index` of the tensor `name`, as they lie here; ArgumentError for another rank's."""
        kept = self._find(name)
        pairs = bounds(name, kept.shape, index)
        extents = [stop - start for start, stop in pairs]
        if 0 in extents:
            return kept.piece.new_empty(extents)
        inside = [(start - at, stop - at) for (start, stop), at in zip(pairs, kept.origin, strict=True)]
        held = zip(inside, kept.piece.shape, strict=True)
        if not all(start >= 0 and stop <= size for (start, stop), size in held):
            self.is_share = True
            raise ArgumentError(name, f"{tuple(kept.piece.shape)} from {kept.origin} on", repr(index))
        return kept.piece[tuple(slice(*pair) for pair in inside)]

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) along each axis of the local part of the tensor `name`."""
        kept = self._find(name)
        ends = zip(kept.origin, kept.piece.shape, strict=False)
        return tuple((at, at + size) for at, size in ends) if kept.piece.ndim == len(kept.shape) else None

    def close(self) -> None:
        """Take no more tensors, and let go of those there are."""
        self.is_closed = True
        self._kept.clear()

    def _check_told(self, slot: ParameterSlot) -> None:
        if slot.whole_inputs and not self.place.is_told:
            name = named(self.place.prefix, slot.suffix)
            told = "a layer that tells its rank: process_group, or tp_rank and tp_size"
            raise ArgumentError(name, f"{told}, as it is whole on every rank", "none")

    def _find(self, name: str) -> Arrived:
        if name not in self._kept:
            raise missing(name, self.keys())
        return self._kept[name]

    def _cut(self, slot: ParameterSlot, part: int, loaded: Tensor) -> tuple[tuple[int, ...], Tensor]:
        """Where this rank's share begins, and the share; all of a tensor of which that is not told."""
        axes, split = slot.spec.axes, self.place.split
        origin = [0] * loaded.ndim
        plain = slot.is_codes and slot.shape is not None and len(axes) == loaded.ndim
        if not plain or split is None or not self.place.is_told:
            return tuple(origin), loaded
        for i, axis in enumerate(axes):
            if axis.dim == split and not axis.free:
                start, share = self._share(axis, part, loaded.shape[i])
                loaded, origin[i] = loaded.narrow(i, start, share), start
        return tuple(origin), loaded

    def _share(self, axis: Axis, part: int, size: int) -> tuple[int, int]:
        """(start, extent) of an equal share of a stored axis, or all of it where ranks have no equal ones."""
        group = self.place.group
        own = axis.size(self.place.parts[part] if axis.dim == "N" else self.place.K) or 0
        ranks, rest = divmod(size, own) if own else (0, 1)
        if rest or not ranks or group.size() % ranks:
            return 0, size
        return group.rank() // (group.size() // ranks) * own, own

    def _hold(self, slot: ParameterSlot, part: int, param: nn.Parameter, piece: Tensor) -> Tensor:
        """A copy of a piece, in the parameter's memory where it fits there."""
        if slot.shape is None:
            return piece.to(param.device, copy=True)
        joined = slot.join is not None and len(self.place.parts) > 1
        shape = list(slot.shape)
        if joined:
            shape[slot.join or 0] = slot.extent(self.place, part)
        one = piece.numel() == 1 and shape == [1]
        if list(piece.shape) != shape and not one:
            return piece.to(param.device, copy=True)
        if not joined:
            param.data = piece.to(param.device, copy=True).reshape(shape).contiguous()
            return param.data.reshape(piece.shape)
        if param.dtype != piece.dtype or not param.data.is_contiguous():
            if not self._is_first(slot):
                return piece.to(param.device, copy=True)
            param.data = torch.empty(slot.shape, dtype=piece.dtype, device=param.device)
        target = self._of_part(slot, part, param.data)
        target.copy_(piece.reshape(shape))
        return target.reshape(piece.shape)

    def _is_first(self, slot: ParameterSlot) -> bool:
        return not any(named(name, slot.suffix) in self._kept for name in self.place.names)

    def _of_part(self, slot: ParameterSlot, part: int, held: Tensor) -> Tensor:
        """A part's piece of a parameter that has all of them."""
        if slot.join is None or len(self.place.parts) == 1:
            return held
        start = sum(slot.extent(self.place, before) for before in range(part))
        return held.narrow(slot.join, start, slot.extent(self.place, part))

    def _whole(
        self, slot: ParameterSlot, part: int, piece: Tensor
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of the tensor that a parameter's piece is a share of, and where this begins."""
        place, shape, origin = self.place, list(piece.shape), [0] * piece.ndim
        for i, axis in enumerate(slot.spec.axes):
            if axis.dim == place.split and i not in slot.whole_inputs and axis.dim != PARTS:
                N = place.parts[part] * place.group.size()
                shape[i] = axis.size(N if axis.dim == "N" else place.whole[1]) or shape[i]
                origin[i] = place.group.rank() * piece.shape[i]
        return tuple(shape), tuple(origin)
