"""Keys and values of the tokens so far, in pages that sequences take one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, ShapeError, check_fields
from qload.models.config import TextConfig


@dataclass(frozen=True)
class HeadSizes:
    """Which sizes of heads an attention backend takes; by default all, of keys and values apart.

    ArgumentError for a size or a multiple below 1.

    Attributes
    ----------
    only
        The sizes that there are kernels for; None: all multiples of `multiple`.
    multiple
        What a size has to be a multiple of.
    largest
        The largest size; None: there is none.
    equal
        Whether keys and values have to be of one size.
    """

    only: tuple[int, ...] | None = None
    multiple: int = 1
    largest: int | None = None
    equal: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        numbers = {"only": min(self.only or (1,)), "multiple": self.multiple, "largest": self.largest or 1}
        for name, number in numbers.items():
            if number < 1 or getattr(self, name) in (0, ()):
                raise ArgumentError(name, "sizes of 1 or more", str(getattr(self, name)))

    def padded(self, key: int, value: int) -> tuple[int, int]:
        """The sizes that heads of `key` (queries too) and of `value` get: the smallest that do.

        ArgumentError where there is none.
        """
        if self.equal:
            key = value = max(key, value)
        return self._fitting("key", key), self._fitting("value", value)

    def _fitting(self, name: str, size: int) -> int:
        multiple = -(-size // self.multiple) * self.multiple
        fitting = [multiple] if self.only is None else [each for each in self.only if each >= size]
        fitting = [each for each in fitting if each % self.multiple == 0 and each <= (self.largest or each)]
        if size < 1 or not fitting:
            raise ArgumentError(name, f"a size of heads that the backend takes, of {self}", str(size))
        return min(fitting)


def padded(heads: Tensor, size: int) -> Tensor:
    """`heads` (..., D) with zeros after them: (..., `size`); as they are where D is `size`.

    ShapeError for a `size` below D.
    """
    missing = size - heads.shape[-1]
    if missing < 0:
        raise ShapeError("heads", f"(..., D) of D <= {size}", tuple(heads.shape))
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def unpadded(heads: Tensor, size: int) -> Tensor:
    """The first `size` elements of `heads` (..., D): (..., `size`), a view; ShapeError for fewer."""
    if heads.shape[-1] < size:
        raise ShapeError("heads", f"(..., D) of D >= {size}", tuple(heads.shape))
    return heads[..., :size]


class PagedCache(nn.Module):
    """Keys (Dk) and values (Dv) of `pages` * `page_size` tokens, for every layer; zeros until written.

    ArgumentError for sizes below 1.

    Parameters
    ----------
    layers, pages, page_size
        How many layers, how many pages each has, and how many tokens fit into a page.
    kv_heads, k_dim, v_dim
        Heads of keys and values that this rank has; numbers of a head of keys, and of values. Either may be
        larger than the model's own, for attention that wants heads of one size: what is written has it too.
    dtype, device
        Of the tensors.
    """

    keys: Tensor
    values: Tensor

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
    ) -> None:
        super().__init__()
        sizes = {"layers": layers, "pages": pages, "page_size": page_size}
        sizes |= {"kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        self.page_size: int = page_size
        for name, dim in (("keys", k_dim), ("values", v_dim)):
            held = torch.zeros(layers, pages, page_size, kv_heads, dim, dtype=dtype, device=device)
            self.register_buffer(name, held, persistent=False)

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
        """A cache of `pages` of `page_size` tokens for one of `ranks` of a model, sized by its `config`.

        `dtype`, `device`: of keys and values. `head_sizes`: those that attention takes, to which heads are
        padded; None: all. DeepSeek's keys have `qk_nope_head_dim + qk_rope_head_dim` numbers, and its values
        `v_head_dim`.
        """
        heads = max(1, config.kv_heads // ranks)
        widths = (head_sizes or HeadSizes()).padded(config.head_dim, config.v_head_dim)
        return cls(config.layers, pages, page_size, heads, *widths, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """How much memory keys and values take."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def pages(self) -> int:
        """How many pages there are."""
        return self.keys.shape[1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys `k` (T, kv_heads, Dk) and values `v` (T, kv_heads, Dv) of a `layer`, to `slots` (T,).

        Narrower heads than the cache has end in zeros; ShapeError for wider ones.
        """
        for held, heads in ((self.keys[layer], k), (self.values[layer], v)):
            held.flatten(0, 1).index_copy_(0, slots, padded(heads, held.shape[-1]))

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (S, L, kv_heads, Dk), values (S, L, kv_heads, Dv) of a `layer`'s `pages` (S, P); L tokens.

        Copies; what a page holds that its sequence has not written is for a mask to hide.
        """
        return self._gathered(self.keys[layer], pages), self._gathered(self.values[layer], pages)

    def _gathered(self, held: Tensor, pages: Tensor) -> Tensor:
        taken = held.index_select(0, pages.flatten())
        return taken.view(pages.shape[0], -1, *held.shape[2:])

    def extra_repr(self) -> str:
        """Sizes and bytes."""
        layers, pages, size, heads, dim = self.keys.shape
        sizes = f"layers={layers}, pages={pages} of {size} tokens, kv_heads={heads}"
        return f"{sizes}, k_dim={dim}, v_dim={self.values.shape[-1]}, {self.bytes} bytes"


NOBODYS = 0  # a page that no sequence is given: tables are filled up with it


def page_count(sequences: int, tokens: int, page_size: int) -> int:
    """How many pages a cache needs for so many sequences of so many tokens each, and nobody's."""
    return 1 + sequences * -(-tokens // page_size)


class PageTable:
    """Pages of a cache, given to sequences as they grow.

    Parameters
    ----------
    sequences, tokens
        How many sequences there are at once, and how many tokens each has at most.
    page_size
        How many tokens a page holds.
    """

    def __init__(self, sequences: int, tokens: int, page_size: int) -> None:
        self.page_size: int = page_size
        self.width: int = -(-tokens // page_size)  # pages of a sequence at most
        self.pages: int = page_count(sequences, tokens, page_size)
        self._free = list(range(self.pages - 1, NOBODYS, -1))  # the lowest number is given first
        self._held: list[list[int]] = [[] for _ in range(sequences)]
        self._lengths = [0] * sequences

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._lengths[sequence]

    def restart(self, sequence: int) -> list[int]:
        """The sequence has no tokens any more, and its pages are free: which those are."""
        freed = self._held[sequence]
        self._free.extend(reversed(freed))
        self._held[sequence], self._lengths[sequence] = [], 0
        return freed

    def grow(self, sequence: int, tokens: int) -> tuple[list[int], list[int]]:
        """The positions of so many new tokens, and the slots of the cache that they are given."""
        positions = list(range(self._lengths[sequence], self._lengths[sequence] + tokens))
        held, size = self._held[sequence], self.page_size
        while len(held) * size <= positions[-1]:
            held.append(self._free.pop())
        self._lengths[sequence] += tokens
        return positions, [held[at // size] * size + at % size for at in positions]

    def table(self, sequences: Sequence[int], width: int | None = None) -> list[list[int]]:
        """A row of pages for each of the sequences, as wide as the longest needs, or `width`."""
        held = [self._held[sequence] for sequence in sequences]
        wide = max(map(len, held)) if width is None else width
        return [pages + [NOBODYS] * (wide - len(pages)) for pages in held]


R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Step:
    """T = S * Q tokens: of S sequences Q new tokens each, one sequence after another.

    Nothing in it is looked at from the host, so that a step of fixed sizes can be captured in a CUDA graph.
    ArgumentError for tensors that are no indices or lie on several devices, ShapeError for other shapes.

    Attributes
    ----------
    positions
        (T,), int64: the place of each token in its sequence, from 0 on.
    slots
        (T,), int64: where its keys and values are written: page * page size + place in the page.
    pages
        (S, P), int64: the pages of each sequence in the order of its tokens. What a sequence has no page for
        yet holds the number of any page: no token sees it.
    """

    positions: Tensor
    slots: Tensor
    pages: Tensor
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, tensor, dims in (
            ("positions", self.positions, 1),
            ("slots", self.slots, 1),
            ("pages", self.pages, 2),
        ):
            if tensor.dtype != torch.int64:
                raise ArgumentError(f"step: {name}", "indices of int64", str(tensor.dtype))
            if tensor.device != self.positions.device:
                raise ArgumentError(
                    f"step: {name}", f"a tensor on {self.positions.device}", str(tensor.device)
                )
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
        """The next `tokens` of sequences that have `starts` tokens, whose `pages` are lists of one length.

        `page_size`: tokens of a page; `device`: where the tensors are made.
        """
        places = [[start + new for new in range(tokens)] for start in starts]
        slots = [
            own[at // page_size] * page_size + at % page_size
            for own, each in zip(pages, places, strict=True)
            for at in each
        ]
        made = ([at for each in places for at in each], slots, pages)
        positions, to, table = (torch.tensor(each, dtype=torch.int64, device=device) for each in made)
        return cls(positions, to, table)

    @property
    def sequences(self) -> int:
        """S, how many sequences there are."""
        return self.pages.shape[0]

    @property
    def new(self) -> int:
        """Q, how many new tokens each has."""
        return self.positions.shape[0] // self.sequences

    def begun(self) -> Self:
        """The same step with nothing kept: what `kept` holds follows from tensors that may be rewritten."""
        return replace(self, _kept={})

    def kept(self, key: Any, make: Callable[[], R]) -> R:
        """What `make` returned for a `key` when it was asked for first in this pass, for layers to share."""
        if key not in self._kept:
            self._kept[key] = make()
        made: R = self._kept[key]
        return made
