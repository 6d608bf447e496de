"""Paged key-value cache: its storage, the pages of each sequence, and the token positions of a step.

Heads may be padded with zeros to a size that an attention backend supports. Padded queries and keys have the
same scores, as the softmax scale is that of the true size; padded values give outputs that end in zeros,
which `unpad_heads` drops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, ShapeError, check_fields
from qload.models.config import TextConfig

R = TypeVar("R")
PADDING_PAGE = 0  # never given to a sequence; fills the rows of page tables


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes that an attention backend supports; by default all, for keys and values independently.

    ArgumentError for a size or a multiple below 1.

    Attributes
    ----------
    only
        The sizes with a kernel; None: all multiples of `multiple`.
    multiple
        Required divisor of a size.
    largest
        The largest size; None: no limit.
    equal
        Whether keys and values need the same size.
    """

    only: tuple[int, ...] | None = None
    multiple: int = 1
    largest: int | None = None
    equal: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        minima = {"only": min(self.only or (1,)), "multiple": self.multiple, "largest": self.largest or 1}
        for name, size in minima.items():
            if size < 1 or getattr(self, name) in (0, ()):
                raise ArgumentError(name, "sizes of 1 or more", str(getattr(self, name)))

    def padded(self, key: int, value: int) -> tuple[int, int]:
        """Return the smallest supported sizes for heads of `key` (queries too) and of `value` elements.

        ArgumentError if there is none.
        """
        if self.equal:
            key = value = max(key, value)
        return self._smallest("key", key), self._smallest("value", value)

    def _smallest(self, name: str, size: int) -> int:
        candidates = [-(-size // self.multiple) * self.multiple] if self.only is None else self.only
        limit = max(candidates) if self.largest is None else self.largest
        fitting = [n for n in candidates if size <= n <= limit and n % self.multiple == 0]
        if size < 1 or not fitting:
            raise ArgumentError(name, f"a supported head size, of {self}", str(size))
        return min(fitting)


def pad_heads(heads: Tensor, size: int) -> Tensor:
    """Pad `heads` (..., D) with zeros to (..., `size`); unchanged where D is `size`.

    ShapeError for a `size` below D.
    """
    missing = size - heads.shape[-1]
    if missing < 0:
        raise ShapeError("heads", f"(..., D) of D <= {size}", tuple(heads.shape))
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def unpad_heads(heads: Tensor, size: int) -> Tensor:
    """Return the first `size` elements of `heads` (..., D): (..., `size`), a view; ShapeError for fewer."""
    if heads.shape[-1] < size:
        raise ShapeError("heads", f"(..., D) of D >= {size}", tuple(heads.shape))
    return heads[..., :size]


def visible_keys(positions: Tensor, keys: int, window: int | None, chunk: int | None) -> Tensor:
    """Mask of the first `keys` keys, True if visible to a token at `positions` (...): bool (..., keys)."""
    at, queries = torch.arange(keys, device=positions.device), positions.unsqueeze(-1)
    visible = at <= queries
    if window is not None:
        visible &= at > queries - window
    if chunk is not None:
        visible &= at // chunk == queries // chunk
    return visible


class PagedCache(nn.Module):
    """Keys (Dk) and values (Dv) of `pages` * `page_size` tokens, for every layer; zeros until written.

    ArgumentError for sizes below 1.

    Parameters
    ----------
    layers, pages, page_size
        Number of layers, pages of each layer, and tokens of a page.
    kv_heads, k_dim, v_dim
        Heads of keys and values on this rank; elements of a head of keys, and of values. Either may be larger
        than the model's own; written heads are padded to it.
    dtype, device
        Of keys and values.
    index_dim
        Elements of the key that the indexer of DeepSeek V3.2 stores for a token; 0: no such keys.
    """

    keys: Tensor
    values: Tensor
    index_keys: Tensor | None

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        index_dim: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"layers": layers, "pages": pages, "page_size": page_size}
        sizes |= {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.page_size: int = page_size
        for name, dim in (("keys", k_dim), ("values", v_dim)):
            cells = torch.zeros(layers, pages, page_size, kv_heads, dim, dtype=dtype, device=device)
            self.register_buffer(name, cells, persistent=False)
        shape = (layers, pages, page_size, index_dim)
        index_keys = torch.zeros(shape, dtype=dtype, device=device) if index_dim else None
        self.register_buffer("index_keys", index_keys, persistent=False)

    @classmethod
    def of(
        cls,
        config: TextConfig,
        *,
        pages: int,
        page_size: int = 16,
        ranks: int = 1,
        head_sizes: HeadSizes | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Create a cache of `pages` of `page_size` tokens for one of `ranks` of a model, by its `config`.

        `dtype`, `device`: of keys and values. `head_sizes`: the sizes that attention supports, to which heads
        are padded; None: all. DeepSeek's keys have `qk_nope_head_dim + qk_rope_head_dim` elements, and its
        values `v_head_dim`.
        """
        heads = max(1, config.kv_heads // ranks)
        widths = (head_sizes or HeadSizes()).padded(config.head_dim, config.v_head_dim)
        index_dim = 0 if config.indexer is None else config.indexer.head_size
        sizes = (config.layers, pages, page_size, heads, *widths)
        return cls(*sizes, dtype=dtype, device=device, index_dim=index_dim)

    @property
    def bytes(self) -> int:
        """Memory of all keys and values in bytes."""
        return sum(cells.nbytes for cells in self.buffers())

    @property
    def pages(self) -> int:
        """Number of pages."""
        return self.keys.shape[1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys `k` (T, kv_heads, Dk) and values `v` (T, kv_heads, Dv) of a `layer` to `slots` (T,).

        Heads narrower than the cache's are padded; ShapeError for wider ones.
        """
        for cells, heads in ((self.keys[layer], k), (self.values[layer], v)):
            cells.flatten(0, 1).index_copy_(0, slots, pad_heads(heads, cells.shape[-1]))

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys (S, L, kv_heads, Dk) and values (S, L, kv_heads, Dv) of `pages` (S, P) of a `layer`.

        Copies of L = P * page size tokens. Cells that a sequence has not written are to be masked by the
        caller.
        """
        return self._gather(self.keys[layer], pages), self._gather(self.values[layer], pages)

    def write_index(self, layer: int, slots: Tensor, keys: Tensor) -> None:
        """Write the index `keys` (T, index dim) of a `layer` to `slots` (T,)."""
        self._index_keys(layer).flatten(0, 1).index_copy_(0, slots, keys)

    def read_index(self, layer: int, pages: Tensor) -> Tensor:
        """Gather the index keys (S, L, index dim) of `pages` (S, P) of a `layer`, as `read`."""
        return self._gather(self._index_keys(layer), pages)

    def _index_keys(self, layer: int) -> Tensor:
        if self.index_keys is None:
            raise ArgumentError("cache", "PagedCache.of(config), with keys of the indexer", "a cache without")
        return self.index_keys[layer]

    def _gather(self, cells: Tensor, pages: Tensor) -> Tensor:
        gathered = cells.index_select(0, pages.flatten())
        return gathered.view(pages.shape[0], -1, *cells.shape[2:])

    def extra_repr(self) -> str:
        """Sizes and bytes."""
        layers, pages, size, heads, dim = self.keys.shape
        sizes = f"layers={layers}, pages={pages} of {size} tokens, kv_heads={heads}"
        return f"{sizes}, k_dim={dim}, v_dim={self.values.shape[-1]}, {self.bytes} bytes"


def page_count(sequences: int, tokens: int, page_size: int) -> int:
    """Return the pages of a cache for `sequences` of `tokens` tokens each, with the padding page."""
    return 1 + sequences * -(-tokens // page_size)


class PageTable:
    """Pages of each sequence, allocated on the host as sequences grow.

    Parameters
    ----------
    sequences, tokens
        Largest number of sequences at once, and of tokens per sequence.
    page_size
        Tokens of a page.
    """

    def __init__(self, sequences: int, tokens: int, page_size: int) -> None:
        self.page_size: int = page_size
        self.width: int = -(-tokens // page_size)  # pages of the longest sequence
        self.pages: int = page_count(sequences, tokens, page_size)
        self._free = list(range(self.pages - 1, PADDING_PAGE, -1))  # the lowest number is allocated first
        self._pages: list[list[int]] = [[] for _ in range(sequences)]
        self._lengths = [0] * sequences

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._lengths[sequence]

    def restart(self, sequence: int) -> list[int]:
        """Empty a sequence and return its pages, which are free again."""
        freed = self._pages[sequence]
        self._free.extend(reversed(freed))
        self._pages[sequence], self._lengths[sequence] = [], 0
        return freed

    def grow(self, sequence: int, tokens: int) -> tuple[list[int], list[int]]:
        """Return the positions of `tokens` new tokens of a sequence, and their slots in the cache."""
        positions = list(range(self._lengths[sequence], self._lengths[sequence] + tokens))
        pages, size = self._pages[sequence], self.page_size
        while len(pages) * size <= positions[-1]:
            pages.append(self._free.pop())
        self._lengths[sequence] += tokens
        return positions, [pages[at // size] * size + at % size for at in positions]

    def table(self, sequences: Sequence[int], width: int | None = None) -> list[list[int]]:
        """Return a row of pages for each sequence, padded to the longest one or to `width`."""
        rows = [self._pages[sequence] for sequence in sequences]
        columns = max(map(len, rows)) if width is None else width
        return [pages + [PADDING_PAGE] * (columns - len(pages)) for pages in rows]


@dataclass(frozen=True, eq=False)
class Step:
    """T = S * Q tokens of a forward pass: Q new tokens of each of S sequences, one sequence after another.

    The host reads no element of its tensors, so that a step of fixed sizes can be captured in a CUDA graph.
    ArgumentError for tensors of another dtype than int64 or on several devices, ShapeError for other shapes.

    Attributes
    ----------
    positions
        (T,), int64: position of each token in its sequence, from 0 on.
    slots
        (T,), int64: cache slot of its keys and values: page * page size + offset in the page.
    pages
        (S, P), int64: pages of each sequence in the order of its tokens. Entries past its last page may be
        the number of any page; masks hide them.
    """

    positions: Tensor
    slots: Tensor
    pages: Tensor
    _cached: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        device = self.positions.device
        for name, dims in (("positions", 1), ("slots", 1), ("pages", 2)):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int64:
                raise ArgumentError(f"step: {name}", "indices of int64", str(tensor.dtype))
            if tensor.device != device:
                raise ArgumentError(f"step: {name}", f"a tensor on {device}", str(tensor.device))
            if tensor.ndim != dims:
                raise ShapeError(f"step: {name}", "(T,)" if dims == 1 else "(S, P)", tuple(tensor.shape))
        tokens, sequences = self.positions.shape[0], self.pages.shape[0]
        if not sequences or tokens % sequences:
            raise ShapeError("step: positions", f"(S * Q,) with S = {sequences} sequences", (tokens,))
        if self.slots.shape[0] != tokens:
            raise ShapeError("step: slots", f"({tokens},), as positions", tuple(self.slots.shape))

    @classmethod
    def of(
        cls,
        starts: list[int],
        *,
        tokens: int,
        pages: list[list[int]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> "Step":
        """Create the step of the next `tokens` tokens of sequences that have `starts` tokens.

        `pages`: a list per sequence, all of one length. `page_size`: tokens of a page. `device`: of the
        tensors.
        """
        positions = [[start + new for new in range(tokens)] for start in starts]
        slots = [
            row[at // page_size] * page_size + at % page_size
            for row, places in zip(pages, positions, strict=True)
            for at in places
        ]
        lists = ([at for places in positions for at in places], slots, pages)
        flat, to, table = (torch.tensor(values, dtype=torch.int64, device=device) for values in lists)
        return cls(flat, to, table)

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return self.pages.shape[0]

    @property
    def new(self) -> int:
        """Number of new tokens of each sequence, Q."""
        return self.positions.shape[0] // self.sequences

    def begun(self) -> Self:
        """Return the same step with an empty cache, as the tensors may have been overwritten."""
        return replace(self, _cached={})

    def kept(self, key: Any, make: Callable[[], R]) -> R:
        """Return the cached value of `key`, computed by `make` in the first call; layers share it."""
        if key not in self._cached:
            self._cached[key] = make()
        value: R = self._cached[key]
        return value
