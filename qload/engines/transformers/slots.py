"""What stands in a model where a linear layer stood: transformers sees its sizes, qload multiplies."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError


class ModuleSlot(nn.Module):
    """What both kinds of slots have in common: their weights move, and no cast reaches them.

    Attributes
    ----------
    dtype
        Of the activations, for which weights are fitted when they are loaded.
    """

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move all tensors by `fn`; ArgumentError where it means another type of activations."""
        check_move(fn, self.dtype)
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return moved


def check_move(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """ArgumentError where `fn`, which moves tensors of activations of a `dtype`, makes others of them."""
    got = fn(torch.empty(0, dtype=dtype)).dtype
    if got != dtype:
        expected = f"{dtype}, which the model was loaded with; load(path, dtype=...) is told another"
        raise ArgumentError("dtype", expected, str(got))


def refuse_casts(model: Any, dtype: torch.dtype) -> None:
    """Let a cast of the whole `model` be refused before any of its tensors is one of another type."""
    model._apply = partial(_apply_to_all, model, dtype)


def _apply_to_all(
    model: Any, dtype: torch.dtype, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    check_move(fn, dtype)
    return type(model)._apply(model, fn, recurse)


class LinearSlot(ModuleSlot):
    """A layer (..., K) -> (..., N) whose weight qload loads once transformers has loaded the rest.

    Parameters
    ----------
    in_features, out_features
        K and N of the whole layer, whichever share of it this rank will have.
    bias
        The parameter that transformers loads, moves and shards as any other; the product adds it.
    dtype
        Of the activations.
    """

    _hf_quantized_needs_local_tp = True  # ranks call it with, and get from it, their own plain tensors
    _is_hf_initialized = True

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.in_features: int = in_features
        self.out_features: int = out_features
        self.dtype = dtype
        self.device: torch.device = torch.device("meta")
        self.linear: nn.Module | None = None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)
        self.stored: nn.Parameter | None
        self.register_parameter("stored", None)

    @property
    def weight(self) -> Tensor:
        """(N, K) for who asks a layer for the type, shape and device of its weight; its numbers are NaN.

        On device "meta" before the slot is filled.
        """
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return nothing.expand(self.out_features, self.in_features)

    def reserve(self, nbytes: int) -> None:
        """Stand for `nbytes` bytes while transformers decides what to put on which device."""
        held = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        self.stored = nn.Parameter(held, requires_grad=False)

    def release(self) -> None:
        """Stand for nothing: where the layer goes is decided."""
        self.stored = None

    def fill(self, linear: nn.Module, device: torch.device) -> None:
        """From now on `linear` multiplies, on `device`: a module (x, bias) -> y of this rank's share."""
        self.linear, self.device = linear, device

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> (..., N), the bias added in the product; ArgumentError before it is filled."""
        if self.linear is None:
            raise ArgumentError("layer", "one that is loaded", "a slot that nothing has filled")
        bias = self.bias  # looked up now: of a share of inputs transformers hides it, and adds it to the sum
        y: Tensor = self.linear(x) if bias is None else self.linear(x, bias)
        return y

    def extra_repr(self) -> str:
        """The whole layer's sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        )
