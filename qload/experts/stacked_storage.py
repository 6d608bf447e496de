"""`ExpertStacks`: storage with separate names for the tensors of each expert in a stack.

`experts.gate_up_proj`, a tensor of all experts, becomes `experts.0.gate_proj.weight`,
`experts.0.up_proj.weight`, `experts.1.gate_proj.weight` and so on, each (N, K), as if its owner had stored
them so. A read takes an expert's bytes and no other's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from qload.errors import TwoFormatsError, checked
from qload.experts.stack_finder import StoredStack, search
from qload.experts.stack_layouts import WINDOW_BYTES, Bounds, Slices, Slot, StackOrders, widened
from qload.lazy_torch import Tensor, torch
from qload.storage import TensorInfo, WeightStorage
from qload.storage.protocol import (
    AskedRows,
    bounds,
    check_rows,
    extents,
    metadata_of,
    read_array,
    read_rows,
)

log: logging.Logger = logging.getLogger("qload")


@checked
def with_experts(storage: WeightStorage, config: Mapping[str, Any]) -> WeightStorage:
    """Wrap a storage to list each expert of a stack by its own tensors; `storage` itself without a stack.

    `open_checkpoint` does this. For tensors that come from elsewhere, give `Weights` what this returns.

    Parameters
    ----------
    storage
        Where the tensors are; closing what is returned closes it.
    config
        The model's `config.json`, whole. The tensors determine the layout of a stack; if they are ambiguous,
        its sizes and its `model_type` do. Stacks of plain floats of an unknown type stay as they are, and so
        do unreadable stacks: `ExpertStacks.unread` has the reasons.

    Raises
    ------
    TwoFormatsError
        If a stack and another tensor both have an expert's tensor of one name.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, with_experts
    >>> stack = torch.arange(16.0).reshape(1, 2, 8)  # (experts, inputs, outputs), gate and up in turns
    >>> sizes = {"num_local_experts": 1, "hidden_size": 2, "intermediate_size": 4}
    >>> stored = MemoryStorage({"model.layers.0.mlp.experts.gate_up_proj": stack})
    >>> storage = with_experts(stored, {"model_type": "gpt_oss", **sizes})
    >>> list(storage.keys())
    ['model.layers.0.mlp.experts.0.gate_proj.weight', 'model.layers.0.mlp.experts.0.up_proj.weight']
    >>> storage.read("model.layers.0.mlp.experts.0.gate_proj.weight")
    tensor([[ 0.,  8.],
            [ 2., 10.],
            [ 4., 12.],
            [ 6., 14.]])
    """
    return split_stacks(storage, config)


def split_stacks(
    storage: WeightStorage, config: Mapping[str, Any], orders: StackOrders | None = None
) -> WeightStorage:
    """Return a storage with tensors of each expert; `with_experts` without its check of arguments.

    `orders`: as in `search`.
    """
    result = search(storage, config, orders)
    if not result.stacks and not result.unread:
        return storage
    return ExpertStacks(storage, result.stacks, result.unread)


@dataclass(frozen=True)
class StackedLayers:
    """Layers in one stacked matrix: expert e has `lead.e.layer` for each of `layers`.

    `interleaved`: the outputs of these layers alternate.
    """

    lead: str
    layers: tuple[str, ...]
    count: int
    interleaved: bool

    def of(self, expert: int) -> list[str]:
        """Prefixes of one expert's layers."""
        return [f"{self.lead}.{expert}.{layer}" for layer in self.layers]


class ExpertStacks:
    """A `WeightStorage` over another one, with each expert's tensors in place of their stacks.

    `keys` iterates over all tensors but those stacks; the stacks can still be read by name. `unread`: name of
    a stack's tensor -> the reason why it is unreadable.
    """

    def __init__(
        self,
        storage: WeightStorage,
        stacks: Collection[StoredStack],
        unread: Mapping[str, str],
    ) -> None:
        self.storage: WeightStorage = storage
        self.unread: Mapping[str, str] = unread
        self._stacks = {stack.source: stack for stack in stacks}
        self._slots: dict[str, tuple[Slot, int]] = {}
        stored = storage.keys()
        for stack in stacks:
            for name, slot, expert in stack.names():
                if name in stored or name in self._slots:
                    other = self._slots[name][0].source if name in self._slots else name
                    raise _two(name, stack.source, other)
                self._slots[name] = slot, expert
        self._keys = _Names(stored, self._stacks, self._slots)
        self._last = threading.local()
        self._matrices = {
            stack.prefix: StackedLayers(
                stack.lead, stack.layers, stack.count, any(slot.step > 1 for slot in stack.parts.values())
            )
            for stack in stacks
            if stack.is_weight and not any(slot.bytes_of_block for slot in stack.parts.values())
        }  # except for MXFP4 of gpt-oss, a format of stacks
        if stacks:
            log.info("%s", self.note())

    @property
    def stacks(self) -> Collection[StoredStack]:
        """Stored tensors of several experts."""
        return self._stacks.values()

    def keys(self) -> Collection[str]:
        """The names of all tensors, each expert's in lieu of the stack's; its own name is in it too."""
        return self._keys

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`; MissingTensorError."""
        held = self._slots.get(name) if type(name) is str else None
        if held is None:
            return self.storage.info(name)
        slot, expert = held
        info = slot.info
        if expert and not slot.counted:
            return TensorInfo(info.stored_dtype, info.shape, info.file, shared=True)
        return info

    @checked
    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """A copy, on the CPU, of exactly the elements `index` of the tensor `name`, of one expert alone."""
        if name not in self._slots:
            return self.storage.read(name, index)
        slot, expert = self._slots[name]
        pairs = bounds(name, slot.info.shape, index)
        if 0 in extents(pairs):
            return torch.empty(extents(pairs), dtype=slot.info.dtype)
        return slot.arranged(self._block(slot, slot.stored(expert, pairs)), pairs)

    def read_array(self, name: str, index: tuple[slice, ...] = ()) -> NDArray[Any]:
        """Read like `read`, as an array; without torch, unless the tensor is part of a stack."""
        if name not in self._slots:
            return read_array(self.storage, name, index)
        values: NDArray[Any] = self.read(name, index).numpy()
        return values

    def read_rows(self, asked: Sequence[AskedRows]) -> None:
        """Read the same elements of several tensors, each into a row; consecutive experts of a stack at once.

        `asked`: (names, index, out) each, as of `SafetensorsStorage.read_rows`.
        """
        reads, copies = self.reads_of_rows(asked)
        if reads:
            read_rows(self.storage, reads)
        for copy in copies:
            copy()

    def reads_of_rows(self, asked: Sequence[AskedRows]) -> tuple[list[AskedRows], list[Callable[[], object]]]:
        """Translate reads of rows to reads of the storage below, and to copies after them.

        Consecutive experts of a stack are one read. Gate and up of an interleaved stack share a block of it,
        on the device of the rows.
        """
        reads, copies = list[AskedRows](), list[Callable[[], object]]()
        blocks = dict[tuple[str, str], Tensor]()
        for names, index, out in asked:
            places = [self._slots.get(name) for name in names]
            if not any(places):
                reads.append((names, index, out))
                continue
            slot, expert = places[0] or (None, 0)
            in_one_run = places == [(slot, expert + at) for at in range(len(names))]
            if slot is None or not slot.counted or slot.layers_of_shape or not in_one_run:
                copies.append(partial(self._read_each, names, index, out))
                continue
            pairs = bounds(names[0], slot.info.shape, index)
            check_rows(names[0], out, [len(names), *extents(pairs)], slot.info.dtype, ("cpu", "cuda"))
            info, stored = self.storage.info(slot.source), slot.stored(expert, pairs, len(names))
            shape = extents(bounds(slot.source, info.shape, stored))  # may have axes of length 1 more
            if not out.numel():
                continue
            if slot.is_plain and out.is_contiguous():
                reads.append(([slot.source], stored, out.view(1, *shape)))
                continue
            if slot.inputs_first:  # columns of long rows
                copies.append(partial(self._read_columns, slot, expert, pairs, out))
                continue
            key = slot.source, str(stored)
            if key not in blocks:
                blocks[key] = torch.empty(shape, dtype=out.dtype, device=out.device)
                reads.append(([slot.source], stored, blocks[key][None]))
            copies.append(partial(_arrange, slot, blocks[key], pairs, out))
        return reads, copies

    def _read_columns(self, slot: Slot, expert: int, pairs: Bounds, out: Tensor) -> None:
        """Read runs of experts by blocks of some columns."""
        info = self.storage.info(slot.source)
        run = max(1, WINDOW_BYTES // max(1, info.nbytes // info.shape[0]))
        for at in range(0, len(out), run):
            rows = out[at : at + run]
            stored = slot.stored(expert + at, pairs, len(rows))
            _arrange(slot, self._block(slot, stored), pairs, rows)

    def _read_each(self, names: Sequence[str], index: tuple[slice, ...], out: Tensor) -> None:
        for name, row in zip(names, out, strict=True):
            row.copy_(self.read(name, index))

    @property
    def metadata(self) -> Mapping[str, Mapping[str, str]]:
        """Free text in the headers of the underlying files."""
        return metadata_of(self.storage)

    def close(self) -> None:
        """Close the storage below."""
        self._last = threading.local()
        self.storage.close()

    def within(self, name: str) -> Iterator[str]:
        """Names of the experts' tensors in the stack `name`; for any other tensor, its own name."""
        stack = self._stacks.get(name)
        return iter((name,)) if stack is None else (held for held, _, _ in stack.names())

    def matrix(self, prefix: str) -> StackedLayers | None:
        """Layers of the stacked matrix `prefix`, such as `experts.down_proj`; None for any other name."""
        return self._matrices.get(prefix)

    def note(self) -> str:
        """Explain names of experts that no file lists, for an error message; "" without stacks."""
        if not self._stacks:
            return ""
        stacks = sorted(self._stacks.values(), key=lambda stack: not stack.is_weight)
        first = stacks[0]
        part, count = next(iter(first.parts)), len(self._stacks)
        return (
            f"{count} tensors hold something of all experts of a layer, as {first.source}; each expert's is "
            f"shown as its own, as {first.lead}.0.{part}"
        )

    def _block(self, slot: Slot, stored: Slices) -> Tensor:
        """Read a block; the last one is cached for the next slices of it.

        Interleaved gate and up share a block, as do neighbouring columns.
        """
        wide = widened(stored, self.storage.info(slot.source)) if slot.inputs_first else stored
        if wide == stored and slot.step == 1:
            return self.storage.read(slot.source, stored)
        last: tuple[str, Slices, Tensor] | None = getattr(self._last, "block", None)
        if last is None or last[:2] != (slot.source, wide):
            last = slot.source, wide, self.storage.read(slot.source, wide)
            self._last.block = last
        if wide == stored:
            return last[2]
        first = wide[-1].start
        return last[2][..., stored[-1].start - first : stored[-1].stop - first]


def _arrange(slot: Slot, block: Tensor, pairs: Bounds, out: Tensor) -> None:
    out.copy_(slot.arranged_rows(block, pairs))


def within(storage: WeightStorage, name: str) -> Iterator[str]:
    """Names of a stack's tensors, one for each expert; for any other tensor, its own name."""
    return storage.within(name) if isinstance(storage, ExpertStacks) else iter((name,))


class _Names(Collection[str]):
    """All names in order, with the experts' names in place of the stack's; `in` accepts both."""

    def __init__(
        self, stored: Collection[str], stacks: Mapping[str, StoredStack], slots: Mapping[str, object]
    ) -> None:
        self._stored, self._stacks, self._slots = stored, stacks, slots

    def __contains__(self, name: object) -> bool:
        return name in self._stored or name in self._slots

    def __iter__(self) -> Iterator[str]:
        for name in self._stored:
            stack = self._stacks.get(name)
            if stack is None:
                yield name
            else:
                yield from (held for held, _, _ in stack.names())

    def __len__(self) -> int:
        return len(self._stored) - len(self._stacks) + len(self._slots)


def _two(name: str, stack: str, other: str) -> TwoFormatsError:
    return TwoFormatsError(
        name,
        "held by two tensors",
        f"either {stack} or {other}",
        "both",
        "remedy   remove the one that is not meant",
    )
