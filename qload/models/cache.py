"""Keys and values of the tokens so far, in pages that sequences take one by one."""

from typing import Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError
from qload.models.config import TextConfig
from qload.models.padding import HeadSizes, padded


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
