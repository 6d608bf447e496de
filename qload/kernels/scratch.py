"""Scratch space of the ExLlama layers: one buffer a device, as large as the neediest layer asks.

    warm_up(model, max_input_len=4096)      # once all weights are processed, before the first call

A layer dequantizes into it and sums in it, and layers that run one after another share it: run them on
one stream. Not before the longest input is known can its size be, so a layer that is called first refuses.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, NotWarmError
from qload.kernels import dequantize
from qload.spec import Weight

log = logging.getLogger("qload")

ALIGNMENT = 128  # bytes


@dataclass(frozen=True)
class Need:
    """What a layer dequantizes: a weight (K, N), on the device of the parameter `weight`."""

    weight: str
    K: int
    N: int

    def bytes(self, max_input_len: int) -> int:
        """The weight in fp16, then the sums of the longest input in float32."""
        return _aligned(2 * self.K * self.N) + _aligned(4 * self.N * max_input_len)


@dataclass(frozen=True)
class Scratch:
    """A buffer of bytes, and the longest input it was made for."""

    buffer: Tensor
    max_input_len: int


def warm_up(model: nn.Module, max_input_len: int) -> dict[torch.device, int]:
    """Give every ExLlama layer of a model its scratch space -> bytes by device; {} where there is none.

    May be called again, with more layers or longer inputs: what is there grows, it never shrinks.
    """
    if type(max_input_len) is not int or max_input_len < 1:
        raise ArgumentError("max_input_len", "at least 1 token, a whole number", repr(max_input_len))
    layers: dict[torch.device, list[nn.Module]] = {}
    for layer in model.modules():
        if hasattr(layer, "exllama_need"):
            layers.setdefault(getattr(layer, _need(layer).weight).device, []).append(layer)
    given = {}
    for device, members in layers.items():
        before = [s for layer in members if (s := _scratch(layer)) is not None and s.buffer.device == device]
        longest = max([max_input_len, *(scratch.max_input_len for scratch in before)])
        size = max([_need(layer).bytes(longest) for layer in members])
        kept = max(before, key=lambda scratch: scratch.buffer.numel(), default=None)
        if kept is None or kept.buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            buffer = kept.buffer
        scratch = Scratch(buffer, longest)
        for layer in members:
            object.__setattr__(layer, "exllama_scratch", scratch)  # no parameter, buffer or module
        given[device] = buffer.numel()
        log.info("scratch space of %d ExLlama layers on %s: %d bytes", len(members), device, buffer.numel())
    return given


def multiply(layer: nn.Module, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x (..., K) fp16 -> (..., N) fp16, through the layer's scratch space."""
    dequantize.check(x, weight, bias)
    if x.dtype != torch.float16:
        name = weight.layer.name or "weight"
        raise DtypeError(f"{name}: x", ["float16"], str(x.dtype).removeprefix("torch."))
    need, scratch = _need(layer), _scratch(layer)
    if scratch is None or scratch.buffer.device != x.device:
        raise NotWarmError(weight.layer.name or need.weight, str(x.device))
    rows = x.reshape(-1, need.K)
    if rows.shape[0] > scratch.max_input_len:
        raise ArgumentError(
            "x", f"at most {scratch.max_input_len} tokens, as warm_up was told", str(rows.shape[0])
        )
    N, K = need.N, need.K
    at = _aligned(2 * K * N)
    w = scratch.buffer[: 2 * K * N].view(torch.float16).view(N, K)
    sums = scratch.buffer[at : at + 4 * N * rows.shape[0]].view(torch.float32).view(-1, N)
    w.copy_(weight.dequantize())
    with torch.no_grad():
        torch.mm(rows.detach().float(), w.float().T, out=sums)
        if bias is not None:
            sums += bias
    return sums.to(x.dtype).reshape(*x.shape[:-1], N)


def _need(layer: nn.Module) -> Need:
    need: Need = layer.exllama_need  # type: ignore[assignment]
    return need


def _scratch(layer: nn.Module) -> Scratch | None:
    scratch: Scratch | None = getattr(layer, "exllama_scratch", None)
    return scratch


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
