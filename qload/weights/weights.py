"""`Weights`: the tensors of a checkpoint as one rank sees them, and the five typed loads."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from functools import cached_property
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from qload.architecture import Architecture
from qload.errors import ArgumentError, DivideError, MissingTensorError, check_type, checked
from qload.experts.stacked_storage import within
from qload.formats.unquantized import FLOATS
from qload.loader import Blocks, Heads, Part, WeightsLoader, split_blocks
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.parallel import ProcessGroup
from qload.spec import Role, Weight
from qload.storage import TensorInfo, WeightStorage, check_name
from qload.weights.ahead import read_onto
from qload.weights.casts import by_role
from qload.weights.experts import ExpertLoads
from qload.weights.heads import check_heads, load_heads
from qload.weights.ledger import Ledger, LoadReport
from qload.weights.loader_blocks import LoaderBlocks
from qload.weights.memory import TensorShares
from qload.weights.names import SortedNames
from qload.weights.places import aliases_of, along, device_of, group_of
from qload.weights.stream import StreamedLoads

log: logging.Logger = logging.getLogger("qload")


class Weights(LoaderBlocks, ExpertLoads, StreamedLoads, TensorShares):
    """Named tensors over any storage: aliases, prefix, device, dtype by role, and a ledger.

    ArgumentError for a parameter that cannot be acted on.

    Parameters
    ----------
    storage
        Where the tensors are.
    loader
        What turns them into typed weights; `use_loader` swaps it for a block.
    device
        Where tensors are put.
    dtype
        What plain floats are cast to; None keeps what is stored. Packed words, indices, scales,
        integers and float8 are never cast. A cast that overflows raises CastError, on the ranks that
        read the value: of a sharded tensor no rank sees all. dtype=None casts nothing.
    process_group
        Anything with `rank()` and `size()`; None is a world of one.
    aliases
        Other names a tensor may have: `{"lm_head.weight": ["model.embed_tokens.weight"]}`.
    prefix
        Tried before a name that is not stored as it is.
    architecture
        What the model's config tells of its matrices, as `architecture_of` makes it; None: not known. Loads
        by columns without `heads` are refused where it says that they end inside of a head.
    nonfinite
        "error": loads of a layer with a scale that is NaN or infinite are a NonfiniteScaleError, on all ranks
        that share it. "allow": such scales are loaded as they are stored. Plain tensors are not examined.

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
        for argument, value, hint in (
            ("storage", storage, WeightStorage),
            ("loader", loader, WeightsLoader),
            ("device", device, torch.device | str),
            ("prefix", prefix, str | None),
            ("architecture", architecture, Architecture | None),
        ):
            check_type(argument, value, hint)
        if dtype is not None and dtype not in FLOATS:
            raise ArgumentError("dtype", f"None or one of {', '.join(map(str, FLOATS))}", str(dtype))
        check_nonfinite(nonfinite)
        self.storage: WeightStorage = storage
        super().__init__(loader)
        self.device: torch.device = device_of(device)
        self.dtype: torch.dtype | None = dtype
        self.process_group: ProcessGroup = group_of(process_group)
        self.aliases: dict[str, Sequence[str]] = aliases_of(aliases)
        self.prefix: str | None = prefix
        self.architecture: Architecture | None = architecture
        self.nonfinite: Nonfinite = nonfinite
        self._ledger = Ledger()
        if architecture is not None:
            self.exempt_by(architecture.exempt)
        self.exempt(*loader.config_tensors, reason="read as configuration")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.storage.close()

    # The five typed loads

    @checked
    def get_weights(self, prefix: str) -> Weight:
        """The whole layer stored under `prefix`, the same on every rank.

        For a matrix of all experts, such as `experts.down_proj`, a `StackedWeight`.
        """
        return self._load_stack(prefix, None) or self.loader.get_weights(self, prefix)

    @checked
    def get_weights_col(self, prefix: str, *, heads: Heads | None = None) -> Weight:
        """This rank's outputs of the layer under `prefix`: N / ranks of them, and all inputs; or CutError.

        `heads`: of attention, of which each rank gets whole ones; DivideError where they cannot be shared.
        """
        if heads is not None:
            return load_heads(self, [prefix], heads)
        check_heads(self, [prefix])
        return self._load_stack(prefix, "N") or self.loader.get_weights_col(self, prefix)

    @checked
    def get_weights_col_packed(self, prefix: str, block_sizes: Blocks) -> Weight:
        """This rank's outputs of each block of the fused layer under `prefix`.

        `block_sizes`: how many equal blocks, or their sizes, or their proportions.
        """
        return self.loader.get_weights_col_packed(self, prefix, block_sizes)

    @checked
    def get_weights_col_packed_qkv(self, prefix: str, num_heads: int, num_key_value_heads: int) -> Weight:
        """This rank's heads, whole ones, of the layer under `prefix`, which holds queries, keys and values.

        `num_heads` of queries; of fewer `num_key_value_heads` than ranks each is on several ranks: head
        `rank * heads // ranks`. DivideError where the heads cannot be shared so.
        """
        return self.get_weights_col(prefix, heads=Heads(num_heads, num_key_value_heads))

    @checked
    def get_weights_col_packed_gate_up(self, prefix: str) -> Weight:
        """This rank's outputs of the layer under `prefix`, which holds gate and up."""
        return self.get_weights_col_packed(prefix, 2)

    @checked
    def get_partial_weights_col(self, prefix: str) -> Weight:
        """This rank's outputs of the layer under `prefix`, a vocabulary that the ranks need not divide.

        Blocks of ceil(N / ranks) outputs, rounded up to where the format may be cut; the last may be short,
        and an engine that pads vocabularies pads it. DivideError where a rank would have nothing.
        """
        return self.loader.load(self, [Part(prefix, short=True)], "N")

    @checked
    def get_multi_weights_col(
        self, prefixes: Sequence[str], dim: int = 0, *, heads: Heads | None = None
    ) -> Weight:
        """This rank's outputs of the layers under each of `prefixes`, joined along N (`dim` 0).

        `heads`: of attention, of which each rank gets whole ones, where the layers are queries, keys and
        values; DivideError where they cannot be shared. Without it each layer is cut into equal shares,
        which may end inside of a head: refused where `architecture` is known, and not seen where it is not.
        """
        if heads is not None and dim in (0, -2) and prefixes and not isinstance(prefixes, str):
            return load_heads(self, prefixes, heads)
        check_heads(self, prefixes)
        return self.loader.get_multi_weights_col(self, prefixes, dim)

    @checked
    def get_weights_row(self, prefix: str) -> Weight:
        """This rank's inputs of the layer under `prefix`: K / ranks of them, and all outputs; or CutError."""
        return self._load_stack(prefix, "K") or self.loader.get_weights_row(self, prefix)

    def of_group(self, process_group: ProcessGroup) -> Self:
        """These weights as a rank of `process_group` sees them; their own ledger exempts the same tensors.

        The storage is shared: where one closes it, it is closed for both. The loader is the one that serves
        here now. ArgumentError for what is no group, or a rank outside of its world.
        """
        other = copy(self)
        other.process_group, other._loader = group_of(process_group), self.loader
        other._ledger = self.ledger()
        return other

    # Single tensors, any dimension

    def has_tensor(self, name: str) -> bool:
        """Whether `name`, an alias, or either under the prefix is stored."""
        keys = self.storage.keys()
        return (type(name) is str and name in keys) or self._resolve(name) is not None

    def get_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor `name`, from the header."""
        return self.info(name).shape

    @checked
    def get_tensor(self, name: str, *, role: Role | None = None) -> Tensor:
        """All of the tensor `name`; its `role` says whether it is cast, None: as its name tells.

        An unread tensor is returned as stored, without dequantization.
        """
        return self._get(name, (), role)

    @checked
    def get_sharded(self, name: str, dim: int, *, role: Role | None = None) -> Tensor:
        """This rank's equal share of `name` along `dim`, cast by `role`; DivideError where there is none."""
        dim, size = self._dim(name, dim)
        world, rank = self.process_group.size(), self.process_group.rank()
        if size % world:
            raise DivideError(name, dim, size, f"{world} ranks")
        return self._get(name, along(dim, rank * size // world, (rank + 1) * size // world), role)

    @checked
    def get_partial_sharded(self, name: str, dim: int, *, role: Role | None = None) -> Tensor:
        """This rank's share of `name` along `dim`, in blocks of ceil(size / ranks), cast by `role`.

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
        """This rank's equal share of each block of `name` along `dim`, joined, cast by `role`.

        DivideError where a block does not divide. `block_sizes`: as in `get_weights_col_packed`.
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

    # What a loader asks for (qload.loader.TensorSource)

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and file of the tensor `name`, from the header alone; MissingTensorError."""
        return self.storage.info(self._stored(name))

    @checked
    def read(self, name: str, index: tuple[slice, ...] = (), *, role: Role | None = None) -> Tensor:
        """`index` of `name` on the device, cast where `role` allows; not entered into the ledger."""
        stored = self._stored(name)
        return by_role(stored, read_onto(self.storage, stored, index, self.device), self.dtype, role)

    @checked
    def take(self, names: Iterable[str]) -> None:
        """Enter into the ledger that one load used the tensors `names`."""
        stored = (self._resolve(name) or name for name in names)
        self._ledger.take(part for name in stored for part in within(self.storage, name))

    @checked
    def note(self, text: str) -> None:
        """Enter into the ledger, as `text`, that something disagreed without harm."""
        log.info("%s", text)
        self._ledger.notes.append(text)

    def missing(self, name: str, hint: str = "") -> MissingTensorError:
        """The error for a `name` that is not stored: what was tried, what there is instead, and `hint`."""
        tried = self._candidates(name)
        parents = tuple(f"{parent}." for parent, dot, _ in (one.rpartition(".") for one in tried) if dot)
        beside = self._names.under(*parents)
        return MissingTensorError(
            name, tried, beside or get_close_matches(name, self._names.near(name)), hint
        )

    @checked
    def exempt(self, *names: str, reason: str) -> None:
        """The tensors `names` (`*` and `?` as in a shell) may stay unused, for this `reason`."""
        self._ledger.exempt(names, reason)

    @checked
    def exempt_by(self, reason_of: Callable[[str], str | None]) -> None:
        """The tensors for whose names `reason_of` has a reason, and not None, may stay unused for it."""
        self._ledger.reasons.append(reason_of)

    def ledger(self) -> Ledger:
        """A ledger with the same exemptions, in which nothing was used yet: for who accounts for no loads."""
        return self._ledger.fresh()

    def report(self) -> LoadReport:
        """What became of every tensor: used, unused, used twice, exempted or not read with the reason.

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

    def _stored(self, name: str) -> str:
        keys = self.storage.keys()
        if type(name) is str and name in keys:
            return name
        stored = self._resolve(name)
        if stored is None:
            raise self.missing(name)
        return stored

    def _resolve(self, name: str) -> str | None:
        if type(name) is not str:
            check_name(name)
        keys = self.storage.keys()
        if name in keys:
            return name
        if not self.prefix and name not in self.aliases:
            return None
        return next((candidate for candidate in self._candidates(name) if candidate in keys), None)

    @cached_property
    def _names(self) -> SortedNames:
        return SortedNames(self.storage.keys())

    def _dim(self, name: str, dim: int) -> tuple[int, int]:
        shape = self.get_shape(name)
        if not -len(shape) <= dim < len(shape):
            raise ArgumentError("dim", f"a dimension of {name}, which has shape {shape}", str(dim))
        return dim % len(shape), shape[dim]
