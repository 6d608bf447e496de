"""`Weights`: the tensors of a checkpoint for one rank, and the typed loads of its layers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import repeat
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from qload.architecture import Architecture
from qload.dtypes import TORCH
from qload.errors import (
    ArgumentError,
    DivideError,
    MissingTensorError,
    UnsupportedFormatError,
    check_type,
    checked,
)
from qload.experts import ExpertFacts, ExpertSplit, ExpertsWeight
from qload.experts.declared_stacks import stack_names
from qload.experts.load import load_experts, load_stacked
from qload.experts.stacked_storage import ExpertStacks, within
from qload.experts.weight import StackedWeight
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import Blocks, Heads, LoadPlan, Part, Split, TensorSource, WeightsLoader, split_blocks
from qload.loader.base import block_parts, check_join
from qload.loader.layer_values import check_nonfinite
from qload.loader.source import FileElements, Nonfinite
from qload.parallel import ALONE, ProcessGroup, Rank
from qload.spec import Role, Weight, named
from qload.storage import FillingStorage, TensorInfo, WeightStorage, check_name
from qload.storage.protocol import AskedRows, read_array, read_rows
from qload.weights.casts import by_role
from qload.weights.ledger import Ledger, LoadReport
from qload.weights.prefetch import RowReads, begin_rows_natively, find_file_elements, read_to_cuda
from qload.weights.stream import Load, stream_loads

MAX_STAGED_BYTES = 4 << 20  # read to the CPU at once, on the way to a device; larger tensors are read alone
log: logging.Logger = logging.getLogger("qload")

MAX_COMPARED_NAMES = 1 << 12  # all names are compared with a missing one
NEAR_NAMES = 64  # of a larger checkpoint, names before and after a missing one
MAX_LISTED_NAMES = 6
LAST_LETTER = "\U0010ffff"  # sorts after every letter of a name
REMEDY = "read its tensors as stored by get_tensor"
SLICE, TEXT = frozenset({slice}), frozenset({str})

L = TypeVar("L", bound="str | Load")

# Open blocks of `use_loader` in this thread or task, the innermost last.
_BLOCKS: ContextVar[tuple[tuple[Weights, WeightsLoader], ...]] = ContextVar("use_loader", default=())


class SortedNames:
    """Sorted names of a checkpoint, for lookups by prefix in logarithmic time."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sorted = sorted(names)

    def under(self, *leads: str, most: int = MAX_LISTED_NAMES) -> list[str]:
        """The first names with one of some prefixes, sorted."""
        names: set[str] = set()
        for lead in leads:
            at = bisect_left(self._sorted, lead)
            names.update(name for name in self._sorted[at : at + most] if name.startswith(lead))
        return sorted(names)[:most]

    def all_under(self, lead: str) -> list[str]:
        """All names with a prefix, sorted."""
        start, stop = (bisect_left(self._sorted, end) for end in (lead, lead + LAST_LETTER))
        return self._sorted[start:stop]

    def near(self, name: str) -> list[str]:
        """Names to compare with a missing one: all, or its neighbours among many."""
        if len(self._sorted) <= MAX_COMPARED_NAMES:
            return self._sorted
        at = bisect_left(self._sorted, name)
        return self._sorted[max(0, at - NEAR_NAMES) : at + NEAR_NAMES]


class Weights(TensorSource):
    """Named tensors over any storage: aliases, prefix, device, dtype by role, and a ledger.

    ArgumentError for a wrong parameter.

    Parameters
    ----------
    storage
        The tensors.
    loader
        Turns tensors into typed weights; `use_loader` swaps it for a block.
    device
        Device of the loaded tensors.
    dtype
        Dtype of plain floats after the load; None: as stored. Packed words, indices, scales, integers and
        float8 are never cast. An overflowing cast raises CastError, on the ranks that read the value.
    process_group
        An object with `rank()` and `size()`; None is one rank.
    aliases
        Other names of a tensor: `{"lm_head.weight": ["model.embed_tokens.weight"]}`.
    prefix
        Prefix to try before a name that is not stored.
    architecture
        The model's matrices by its config, from `architecture_of`; None: unknown. A load by columns without
        `heads` is refused if its shares end inside an attention head.
    nonfinite
        "error": a layer with a scale that is NaN or infinite raises NonfiniteScaleError, on all ranks.
        "allow": such scales are loaded as stored. Plain tensors are not examined.

    Examples
    --------
    >>> import torch
    >>> from qload import FakeWorld, MemoryStorage, Weights, loader_from_config
    >>> storage = MemoryStorage({"up.weight": torch.ones(4, 2), "down.weight": torch.ones(2, 4)})
    >>> second = list(FakeWorld(2))[1]
    >>> weights = Weights(storage, loader=loader_from_config(None), process_group=second)
    >>> weights.get_weights("up").shape, weights.get_weights_col("up").shape
    ((4, 2), (2, 2))
    >>> with weights.use_loader(loader_from_config(None, target="marlin")):
    ...     weights.get_weights_row("down").shape  # plain layers stay plain
    (2, 2)
    >>> print(weights.report())
    2 used, 0 unused, 1 more than once, 0 exempted
      2 times   up.weight
    """

    def __init__(
        self,
        storage: WeightStorage,
        *,
        loader: WeightsLoader,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        process_group: ProcessGroup | None = None,
        aliases: Mapping[str, Sequence[str]] | None = None,
        prefix: str | None = None,
        architecture: Architecture | None = None,
        nonfinite: Nonfinite = "error",
    ) -> None:
        check_type("storage", storage, WeightStorage)
        check_type("loader", loader, WeightsLoader)
        if prefix is not None:
            check_type("prefix", prefix, str | None)
        if architecture.__class__ is not Architecture:
            check_type("architecture", architecture, Architecture | None)
        if device != "cpu":  # torch is not imported for the default
            check_type("device", device, torch.device | str)
            self.device = device_of(device)
        if dtype is not None and dtype not in map(TORCH.__getitem__, FLOATS):
            raise ArgumentError("dtype", f"None or one of {', '.join(map(str, FLOATS))}", str(dtype))
        check_nonfinite(nonfinite)
        self.storage: WeightStorage = storage
        self._loader = loader
        self.dtype: torch.dtype | None = dtype
        self.process_group: ProcessGroup = group_of(process_group)
        self.aliases: dict[str, Sequence[str]] = aliases_of(aliases)
        self.prefix: str | None = prefix
        self.architecture: Architecture | None = architecture
        self.nonfinite: Nonfinite = nonfinite
        self._ledger = Ledger()
        if architecture is not None:
            self._ledger.reasons.append(architecture.exempt)
        self.exempt(*loader.config_tensors, reason="read as configuration")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.storage.close()

    @cached_property
    def device(self) -> torch.device:
        """Device of the loaded tensors."""
        return torch.device("cpu")

    # Loader

    @property
    def loader(self) -> WeightsLoader:
        """Loader of the innermost block of `use_loader`; outside of blocks, of the constructor."""
        for weights, loader in reversed(_BLOCKS.get()):
            if weights is self:
                return loader
        return self._loader

    @contextmanager
    def use_loader(self, loader: WeightsLoader) -> Iterator[Self]:
        """Use `loader` for the typed loads within the block; blocks nest, and end after exceptions.

        For the thread, or the asyncio task, of the block alone: threads that share these `Weights` have their
        own blocks, and the threads of a pool do not see their caller's.
        """
        block = (self, loader)
        _BLOCKS.set((*_BLOCKS.get(), block))
        try:
            yield self
        finally:  # of two generators with blocks, the first block may end first
            _BLOCKS.set(tuple(open_ for open_ in _BLOCKS.get() if open_ is not block))

    def of_group(self, process_group: ProcessGroup) -> Self:
        """These weights for a rank of `process_group`, with a new ledger of the same exemptions.

        Both share the storage: a close ends both. The loader is the current one. ArgumentError for an object
        without rank and size, and for a rank outside of its world.
        """
        other = copy(self)
        other.process_group, other._loader = group_of(process_group), self.loader
        other._ledger = self.ledger()
        return other

    # Typed loads

    @checked
    def get_weights(self, prefix: str) -> Weight:
        """Load the whole layer under `prefix`, the same on every rank.

        For a matrix of all experts, such as `experts.down_proj`, a `StackedWeight`.
        """
        stack = self._load_stack(prefix, None)
        return stack or self._plan([Part(prefix)], None, "get_weights", prefix).finish(self)

    @checked
    def get_weights_col(self, prefix: str, *, heads: Heads | None = None) -> Weight:
        """Load this rank's outputs of the layer under `prefix`: N / ranks, with all inputs; or CutError.

        `heads`: attention heads, shared in whole heads; DivideError if the ranks cannot share them.
        """
        if heads is not None:
            return self._plan(_head_parts(self, self.loader, [prefix], heads), "N").finish(self)
        check_heads(self, [prefix])
        stack = self._load_stack(prefix, "N")
        return stack or self._plan([Part(prefix)], "N", "get_weights_col", prefix).finish(self)

    @checked
    def get_weights_col_packed(self, prefix: str, block_sizes: Blocks) -> Weight:
        """Load this rank's outputs of each block of the fused layer under `prefix`.

        `block_sizes`: number of equal blocks, or their sizes, or their proportions.
        """
        if "get_weights_col_packed" in self.loader.own_loads:
            return self.loader.get_weights_col_packed(self, prefix, block_sizes)
        return self._plan(block_parts(self.loader, self, prefix, block_sizes), "N").finish(self)

    @checked
    def get_weights_col_packed_qkv(self, prefix: str, num_heads: int, num_key_value_heads: int) -> Weight:
        """Load this rank's attention heads of the fused layer under `prefix`: queries, keys and values.

        With fewer `num_key_value_heads` than ranks, each of them is on several ranks: head
        `rank * heads // ranks`. `num_heads`: query heads. DivideError if the ranks cannot share the heads.
        """
        return self.get_weights_col(prefix, heads=Heads(num_heads, num_key_value_heads))

    @checked
    def get_weights_col_packed_gate_up(self, prefix: str) -> Weight:
        """Load this rank's outputs of the fused layer under `prefix`: gate and up."""
        return self.get_weights_col_packed(prefix, 2)

    @checked
    def get_partial_weights_col(self, prefix: str) -> Weight:
        """Load this rank's outputs of the layer under `prefix`, a vocabulary of any size.

        Blocks of ceil(N / ranks) outputs, rounded up to a valid cut of the format; the last one may be short,
        and an engine with padded vocabularies pads it. DivideError for an empty block.
        """
        return self._plan([Part(prefix, short=True)], "N").finish(self)

    @checked
    def get_multi_weights_col(
        self, prefixes: Sequence[str], dim: int = 0, *, heads: Heads | None = None
    ) -> Weight:
        """Load this rank's outputs of the layers under `prefixes`, joined along N (`dim` 0).

        `heads`: attention heads of queries, keys and values, shared in whole heads; DivideError if the ranks
        cannot share them. Without it each layer is cut into equal shares, which may end inside a head: an
        error with a known `architecture`, and unnoticed without one.
        """
        if heads is not None and dim in (0, -2) and prefixes and not isinstance(prefixes, str):
            return self._plan(_head_parts(self, self.loader, prefixes, heads), "N").finish(self)
        check_heads(self, prefixes)
        check_join(prefixes, dim)
        parts = [Part(prefix) for prefix in prefixes]
        return self._plan(parts, "N", "get_multi_weights_col", prefixes, dim).finish(self)

    @checked
    def get_weights_row(self, prefix: str) -> Weight:
        """Load this rank's inputs of the layer under `prefix`: K / ranks, with all outputs; or CutError."""
        stack = self._load_stack(prefix, "K")
        return stack or self._plan([Part(prefix)], "K", "get_weights_row", prefix).finish(self)

    @checked
    def get_experts(
        self,
        prefix: str,
        *,
        split: ExpertSplit | None = None,
        expert_ranks: int | None = None,
        facts: ExpertFacts | None = None,
    ) -> ExpertsWeight:
        """Load the experts of a layer, or this rank's share of them, as stacked typed weights.

        Each tensor is read for all experts into one stack (E, ...). Before any weight is read, all experts
        are compared and all ranks' cuts are checked: MissingTensorError for a missing expert, MismatchError
        for one stored unlike the first, CutError and DivideError as for single layers. Weights of other
        ranks' experts are not read.

        Parameters
        ----------
        prefix
            Prefix of the experts' names: `model.layers.0.mlp.experts`.
        split
            None: all experts, whole, on every rank. "tensor": a share of every expert, along the outputs of
            gate and up and the inputs of down; the ranks' results are summed. "experts": whole experts; the
            first E % R of R ranks have one of the E experts more. "both": see `expert_ranks`.
        expert_ranks
            Number of runs of experts for "both". Rank r has a share of run r // T, as rank r % T of the
            T = ranks / `expert_ranks` that cut the same experts.
        facts
            Activation and side of the routing weight; None: by the model's config, with an ArgumentError if
            it does not state them.
        """
        return load_experts(self, prefix, split, expert_ranks, facts)

    @checked
    def stream(self, loads: Iterable[L]) -> Iterator[tuple[L, Weight]]:
        """Yield each load with its weight, in order: equal to the typed loads one by one, and faster.

        Threads read the tensors of the next loads, some 128 MiB ahead, while one is checked and repacked; for
        a CUDA device through pinned memory, on their own streams. Errors are those of the typed load, raised
        at its turn. Close or exhaust the iterator: until then threads wait for it.

        Parameters
        ----------
        loads
            Prefixes, each of a whole layer as of `get_weights`, or `Load`s. `load_layers` streams all layers
            of a checkpoint.
        """
        return stream_loads(self, partial(plan_load, self, self.loader), iter(loads))

    def _plan(
        self, parts: Sequence[Part], split: Split | None, own: str | None = None, *arguments: object
    ) -> LoadPlan:
        """Plan a load of `parts`; of a loader that overrides the typed load `own`, a load by it."""
        loader = self.loader
        if own is not None and own in loader.own_loads:
            return LoadPlan(lambda source: getattr(loader, own)(source, *arguments))
        return loader.plan(self, parts, split)

    def _load_stack(self, prefix: str, split: Split | None) -> StackedWeight | None:
        """Load the matrix of all experts under `prefix`; None for any other name.

        UnsupportedFormatError for an unreadable one.
        """
        storage = self.storage
        if not isinstance(storage, ExpertStacks) or type(prefix) is not str:
            return None
        for name in (prefix, f"{self.prefix}.{prefix}") if self.prefix else (prefix,):
            layers = storage.matrix(name)
            if layers is not None:
                return load_stacked(self.loader, self, name, layers, split)
            why = next((storage.unread[own] for own in stack_names(name) if own in storage.unread), None)
            if why is not None:
                raise UnsupportedFormatError(f"{name}: a matrix of several experts", why, remedy=REMEDY)
        return None

    # Single tensors, any dimension

    def has_tensor(self, name: str) -> bool:
        """Return whether `name`, an alias, or either under the prefix is stored."""
        return self._resolve(name) is not None

    def get_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`, from its header."""
        return self.info(name).shape

    @checked
    def get_tensor(self, name: str, *, role: Role | None = None) -> Tensor:
        """Read the whole tensor `name`, cast by `role`; None: the role of its name.

        A tensor without a format is returned as stored, without dequantization.
        """
        return self._get(name, (), role)

    @checked
    def get_sharded(self, name: str, dim: int, *, role: Role | None = None) -> Tensor:
        """Read this rank's equal share of `name` along `dim`, cast by `role`; DivideError without one."""
        dim, size = self._dim(name, dim)
        world, rank = self.process_group.size(), self.process_group.rank()
        if size % world:
            raise DivideError(name, dim, size, f"{world} ranks")
        return self._get(name, along(dim, rank * size // world, (rank + 1) * size // world), role)

    @checked
    def get_partial_sharded(self, name: str, dim: int, *, role: Role | None = None) -> Tensor:
        """Read this rank's share of `name` along `dim`, in blocks of ceil(size / ranks), cast by `role`.

        The last ranks' blocks may be short or empty.
        """
        dim, size = self._dim(name, dim)
        block = -(-size // self.process_group.size())
        start = min(self.process_group.rank() * block, size)
        return self._get(name, along(dim, start, min(start + block, size)), role)

    @checked
    def get_packed_sharded(
        self, name: str, dim: int, block_sizes: Blocks, *, role: Role | None = None
    ) -> Tensor:
        """Read this rank's equal share of each block of `name` along `dim`, joined, cast by `role`.

        DivideError for a block that the ranks do not divide. `block_sizes`: as in `get_weights_col_packed`.
        """
        dim, size = self._dim(name, dim)
        world, rank = self.process_group.size(), self.process_group.rank()
        pieces, start = [], 0
        for block in split_blocks(name, dim, size, block_sizes):
            if block % world:
                raise DivideError(name, dim, block, f"{world} ranks", f"a block at {start} of {size}")
            share = block // world
            pieces.append(along(dim, start + rank * share, start + (rank + 1) * share))
            start += block
        joined = torch.cat([self.read(name, piece, role=role) for piece in pieces], dim)
        self.take([name])
        return joined

    @checked
    def get_tensor_shard(self, tensor: Tensor, dim: int, *, role: Role | None = None) -> Tensor:
        """This rank's equal share of a `tensor` in memory along `dim`, on the device, cast by `role`.

        DivideError without an equal share, ArgumentError for a missing dimension. With `role` None plain
        floats are cast like stored ones; CastError for an overflow.
        """
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ArgumentError("dim", f"a dimension of a tensor of shape {tuple(tensor.shape)}", str(dim))
        size, world, rank = tensor.shape[dim], self.process_group.size(), self.process_group.rank()
        if size % world:
            raise DivideError("tensor", dim % tensor.ndim, size, f"{world} ranks")
        share = tensor.narrow(dim, rank * size // world, size // world).to(self.device)
        return by_role("tensor", share, self.dtype, role)

    # Methods of TensorSource

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`, from the header; MissingTensorError."""
        return self.storage.info(self._stored(name))

    def headers(self, prefix: str, suffixes: Iterable[str]) -> Mapping[str, TensorInfo]:
        """Headers of the stored tensors under `prefix`, by the `suffixes` of their names."""
        if type(self).has_tensor is not Weights.has_tensor or type(self).info is not Weights.info:
            return super().headers(prefix, suffixes)
        keys, info, headers = self._keys, self.storage.info, {}
        renames = bool(self.prefix or self.aliases)
        for suffix in suffixes:
            name = f"{prefix}.{suffix}" if prefix and suffix[0] != "_" else named(prefix, suffix)
            stored = name if name in keys else self._resolve(name) if renames else None
            if stored is not None:
                headers[suffix] = info(stored)
        return headers

    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role | None = None) -> Tensor:
        """Read the slices `index` of `name` to the device, cast by `role`; without a ledger entry."""
        if index.__class__ is not tuple or not SLICE.issuperset(map(type, index)):
            check_type("index", index, tuple[slice, ...])
        if role.__class__ is not Role:
            check_type("role", role, Role | None)
        stored = self._stored(name)
        if self.device.type == "cuda":
            tensor = read_to_cuda(self.storage, stored, index, self.device)
        else:
            tensor = self.storage.read(stored, index).to(self.device)
        return by_role(stored, tensor, self.dtype, role)

    @checked
    def read_into(self, name: str, index: tuple[slice, ...], out: Tensor, *, role: Role) -> None:
        """Read like `read` into `out`, of the slices' shape and dtype; `name`, `index` and `role` as there.

        Straight from the storage if it can, and nothing is moved or cast. ArgumentError for another `out`.
        """
        stored = self._stored(name)
        is_direct = out.dtype == TORCH[self.storage.info(stored).stored_dtype] and out.device.type == "cpu"
        if is_direct and out.is_contiguous() and isinstance(self.storage, FillingStorage):
            self.storage.read_into(stored, index, out)
            return
        tensor = self.read(name, index, role=role)
        if (tensor.shape, tensor.dtype) != (out.shape, out.dtype):
            expected = f"{tensor.dtype} {tuple(tensor.shape)}, as {stored}"
            raise ArgumentError("out", expected, f"{out.dtype} {tuple(out.shape)}")
        out.copy_(tensor)

    def read_rows(self, asked: Sequence[AskedRows]) -> None:
        """Read the same elements of several tensors, each into a row, moved to the device of the rows.

        `asked`: (names, index, out) each; tensors of one shape and dtype, such as one of each expert. Rows of
        another dtype are plain floats in `self.dtype`, else ArgumentError.
        """
        self.begin_rows(asked).finish()

    def begin_rows(self, asked: Sequence[AskedRows]) -> RowReads:
        """Begin the reads of `read_rows`: native threads read at once, other rows of `asked` in `finish`.

        ArgumentError as of `read_rows`.
        """
        storage, keys, together = self.storage, self._keys, list[AskedRows]()
        for names, index, out in asked:
            stored = names
            if not all(map(keys.__contains__, names)):
                stored = [self._stored(name) for name in names]
            is_cast = bool(stored) and out.dtype != TORCH[storage.info(stored[0]).stored_dtype]
            if not is_cast and hasattr(storage, "read_rows"):
                together.append((stored, index, out))
                continue
            for name, row in zip(stored, out, strict=True):
                tensor = self.read(name, index, role=Role.FLOAT if is_cast else Role.WORD)
                if tensor.dtype != out.dtype:
                    raise ArgumentError("asked", f"{tensor.dtype}, as {name}", str(out.dtype))
                row.copy_(tensor)
        arrange: list[Callable[[], object]] = []
        if isinstance(storage, ExpertStacks):
            together, arrange = storage.reads_of_rows(together)
            storage = storage.storage
        by_device = [
            [entry for entry in together if entry[2].device == device]
            for device in dict.fromkeys(out.device for *_, out in together)
        ]
        begun = [begin_rows_natively(storage, entries) for entries in by_device]
        return RowReads(begun, partial(self._read_left, storage), arrange)

    def _read_left(self, storage: WeightStorage, left: Sequence[AskedRows]) -> None:
        """Read rows on this thread."""
        on_cpu = [entry for entry in left if entry[2].device.type == "cpu"]
        if on_cpu:
            read_rows(storage, on_cpu)
        for names, index, out in left:
            if out.device.type != "cpu":
                self._read_to_device(storage, names, index, out)

    def _read_to_device(
        self, storage: WeightStorage, names: Sequence[str], index: tuple[slice, ...], out: Tensor
    ) -> None:
        """Read rows to a device: large ones alone, others together through the CPU."""
        if out.device.type == "cuda" and out[:1].nbytes > MAX_STAGED_BYTES:
            for name, row in zip(names, out, strict=True):
                row.copy_(read_to_cuda(storage, name, index, out.device))
            return
        step = max(1, MAX_STAGED_BYTES // max(1, out[:1].nbytes))
        for at in range(0, len(names), step):
            rows = out[at : at + step]
            staged = torch.empty(rows.shape, dtype=out.dtype, device="cpu")
            read_rows(storage, [(names[at : at + step], index, staged)])
            rows.copy_(staged)

    def read_fact(self, name: str, role: Role = Role.INDEX) -> Tensor:
        """Read the whole tensor `name` to the CPU, without a cast whatever its `role`."""
        return self.storage.read(self._stored(name))

    def place(self, fact: Tensor) -> Tensor:
        """Copy a `fact`, or a part of it, to the device."""
        return fact.clone() if self.device.type == "cpu" else fact.to(self.device, non_blocking=True)

    def file_elements(self, name: str, index: tuple[slice, ...]) -> FileElements | None:
        """Slices `index` of the tensor `name` as a range of its file; None without one, or for a GPU."""
        return find_file_elements(self.storage, self._stored(name), index, self.device)

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part of `name` along each axis."""
        if isinstance(self.storage, PartialStorage):
            return self.storage.readable(name)
        return tuple(zip(repeat(0), self.info(name).shape, strict=False))

    def names(self) -> Collection[str]:
        """Names of all stored tensors."""
        return self._keys

    def names_under(self, lead: str) -> list[str]:
        """Stored names with the prefix `lead`, sorted."""
        return self._names.all_under(lead)

    def is_single_layer(self, prefix: str) -> bool:
        """Return whether the architecture has a single layer `prefix`, outside of experts."""
        if self.architecture is None:
            return False
        place = self.architecture.find(prefix)
        return place is not None and place.expert is None and place.key not in self.architecture.stacks

    def take(self, names: Iterable[str]) -> None:
        """Enter into the ledger that one load used the tensors `names`."""
        if names.__class__ is not list or not TEXT.issuperset(map(type, names)):
            check_type("names", names, Iterable[str])
        keys = self._keys
        stored = [name if name in keys else self._resolve(name) or name for name in names]
        if isinstance(self.storage, ExpertStacks):
            stored = [part for name in stored for part in within(self.storage, name)]
        self._ledger.take(stored)

    @checked
    def note(self, text: str) -> None:
        """Enter a harmless contradiction, as `text`, into the ledger."""
        log.info("%s", text)
        self._ledger.notes.append(text)

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """Create the error for a missing tensor `name`: names tried, similar names, and `hint`."""
        tried = self._candidates(name)
        parents = tuple(f"{parent}." for parent, dot, _ in (one.rpartition(".") for one in tried) if dot)
        siblings = self._names.under(*parents)
        return MissingTensorError(
            name, tried, siblings or get_close_matches(name, self._names.near(name)), hint
        )

    # Ledger

    @checked
    def exempt(self, *names: str, reason: str) -> None:
        """Exempt the tensors `names` (`*` and `?` as in a shell) from use, for a `reason`."""
        self._ledger.exempt(names, reason)

    @checked
    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """Exempt tensors by a function of their names, `reason_of`: a reason, or None for no exemption."""
        self._ledger.reasons.append(reason_of)

    def ledger(self) -> Ledger:
        """A new ledger with the same exemptions."""
        return self._ledger.fresh()

    def report(self) -> LoadReport:
        """Report the use of every tensor: used, unused, used twice, exempted or not read with the reason.

        Scales of the key/value cache, and buffers of positions, masks and counts, are exempted by name.
        """
        return self._ledger.report(self.storage)

    def _get(self, name: str, index: tuple[slice, ...], role: Role | None) -> Tensor:
        tensor = self.read(name, index, role=role)
        self.take([name])
        return tensor

    def _candidates(self, name: str) -> list[str]:
        names = [name, *self.aliases.get(name, ())]
        if self.prefix:
            prefixed = f"{self.prefix}.{name}"
            names += [prefixed, *self.aliases.get(prefixed, ())]
        return names

    @cached_property
    def _keys(self) -> Collection[str]:
        """Names of all stored tensors; a storage never changes them."""
        return self.storage.keys()

    def _stored(self, name: str) -> str:
        if type(name) is str and name in self._keys:
            return name
        stored = self._resolve(name)
        if stored is None:
            raise self.missing(name)
        return stored

    def _resolve(self, name: str) -> str | None:
        if type(name) is not str:
            check_name(name)
        if name in self._keys:
            return name
        if not self.prefix and name not in self.aliases:
            return None
        return next((candidate for candidate in self._candidates(name) if candidate in self._keys), None)

    @cached_property
    def _names(self) -> SortedNames:
        return SortedNames(self._keys)

    def _dim(self, name: str, dim: int) -> tuple[int, int]:
        shape = self.get_shape(name)
        if not -len(shape) <= dim < len(shape):
            raise ArgumentError("dim", f"a dimension of {name}, which has shape {shape}", str(dim))
        return dim % len(shape), shape[dim]


@runtime_checkable
class PartialStorage(Protocol):
    """Storage with parts of tensors, as an engine gets them."""

    def readable(self, name: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part along each axis; None for a part without such bounds."""


class HeaderWeights(Weights):
    """Weights whose layers are described, and not loaded: facts are arrays, and torch is not imported."""

    def read_fact(self, name: str, role: Role = Role.INDEX) -> Any:
        """Read the whole tensor `name` as an array."""
        return read_array(self.storage, self._stored(name))


def check_heads(weights: Weights, prefixes: Sequence[str]) -> None:
    """Raise DivideError, on every rank, for equal shares that end inside an attention head of the config."""
    if weights.architecture is None:
        return
    for prefix in prefixes:
        names = (prefix, f"{weights.prefix}.{prefix}") if weights.prefix else (prefix,)
        known = next(filter(None, map(weights.architecture.heads, names)), None)
        if known is not None:
            known.check_equal_shares(prefix, weights.process_group.size())


def parts_of(weights: Weights, loader: WeightsLoader, load: Load) -> list[Part]:
    """Parts of a load, with the errors of the equal typed load."""
    prefixes = load.prefixes
    if load.heads is not None:
        return _head_parts(weights, loader, prefixes, load.heads)
    if load.block_sizes is not None:
        return block_parts(loader, weights, prefixes[0], load.block_sizes)
    if load.split == "N":
        check_heads(weights, prefixes)
    return [Part(prefix) for prefix in prefixes]


def plan_load(weights: Weights, loader: WeightsLoader, load: str | Load) -> LoadPlan:
    """Plan a load, with the errors of the equal typed load."""
    if isinstance(load, str):
        return loader.plan(weights, [Part(load)], None)
    check_type("loads", load, Load)
    return loader.plan(weights, parts_of(weights, loader, load), load.split)


def _head_parts(weights: Weights, loader: WeightsLoader, prefixes: Sequence[str], heads: Heads) -> list[Part]:
    """Parts for whole attention heads; DivideError on every rank if the ranks cannot share them."""
    layers = [(prefix, loader.shape(weights, prefix)[0]) for prefix in prefixes]
    return heads.parts(layers, weights.process_group.size())


def device_of(device: torch.device | str) -> torch.device:
    """Convert to a torch device; ArgumentError for another value, and for a missing CUDA device."""
    try:
        converted = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError("device", "a device of torch's, as cpu or cuda:0", repr(device)) from error
    count = torch.cuda.device_count() if converted.type == "cuda" and torch.cuda.is_available() else 0
    if converted.type == "cuda" and (converted.index or 0) >= count:
        expected = f"cpu, or one of {count} CUDA devices that torch sees here"
        raise ArgumentError("device", expected, str(converted))
    return converted


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """A group, of one rank for None; ArgumentError for a rank outside of its world."""
    checked_group = ALONE if group is None else group
    if not isinstance(checked_group, ProcessGroup):
        raise ArgumentError("process_group", "None, or anything with rank() and size()", repr(group))
    Rank(checked_group.rank(), checked_group.size())
    return checked_group


def aliases_of(aliases: Mapping[str, Sequence[str]] | None) -> dict[str, Sequence[str]]:
    """Aliases by name; ArgumentError for a name without a list."""
    check_type("aliases", aliases, Mapping[str, Sequence[str] | str] | None)
    for name, others in (aliases or {}).items():
        if isinstance(others, str):  # a sequence too, of letters
            raise ArgumentError("aliases", f"a list of names for {name}", repr(others))
    return dict(aliases or {})


def along(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """Slices [start, stop) of a dimension, and all of the dimensions before it."""
    return (*[slice(None)] * dim, slice(start, stop))
