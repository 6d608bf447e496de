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
from qload.kernels import plans
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")

ALIGNMENT = 128  # bytes
NEEDS, SCRATCH = "exllama_needs", "exllama_scratch"  # of a module: by weight, by device


@dataclass(frozen=True)
class ScratchRequest:
    """Weight (K, N) to dequantize, on the device of the parameter `weight`."""

    weight: str
    K: int
    N: int

    def bytes(self, max_input_len: int) -> int:
        """The weight in 16 bits, then the sums of the longest input in float32."""
        return _aligned(2 * self.K * self.N) + _aligned(4 * self.N * max_input_len)


@dataclass(frozen=True, eq=False)
class ScratchBuffer:
    """A buffer of bytes, and the longest input it was made for."""

    buffer: Tensor
    max_input_len: int


def warm_up(model: nn.Module, max_input_len: int) -> dict[torch.device, int]:
    """Give every ExLlama layer of `model` its scratch space -> bytes by device; {} without such layers.

    May be called again, with more layers or longer inputs: what is there grows, it never shrinks.
    `max_input_len`: the most tokens of a call; ArgumentError where it is not a whole number of at least 1.
    """
    if type(max_input_len) is not int or max_input_len < 1:
        raise ArgumentError("max_input_len", "at least 1 token, a whole number", repr(max_input_len))
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", "a torch.nn.Module", type(model).__name__)
    layers: dict[torch.device, dict[nn.Module, list[ScratchRequest]]] = {}
    for layer in model.modules():
        for need in _needs(layer).values():
            layers.setdefault(getattr(layer, need.weight).device, {}).setdefault(layer, []).append(need)
    return {device: _share(device, needs, max_input_len) for device, needs in layers.items()}


def add_scratch_request(layer: nn.Module, need: ScratchRequest) -> None:
    """Note a weight of a module for `warm_up`; survives a copy of the module."""
    setattr(layer, NEEDS, {**_needs(layer), need.weight: need})


def _share(device: torch.device, needs: dict[nn.Module, list[ScratchRequest]], max_input_len: int) -> int:
    """Give all these modules one buffer -> its bytes."""
    before = [_given(layer)[device] for layer in needs if device in _given(layer)]
    longest = max([max_input_len, *(scratch.max_input_len for scratch in before)])
    size = max(need.bytes(longest) for each in needs.values() for need in each)
    kept = max(before, key=lambda scratch: scratch.buffer.numel(), default=None)
    if kept is None or kept.buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
    else:
        buffer = kept.buffer
    for layer in needs:
        setattr(layer, SCRATCH, {**_given(layer), device: ScratchBuffer(buffer, longest)})
    log.info("scratch space of %d modules on %s: %d bytes", len(needs), device, buffer.numel())
    return buffer.numel()


def multiply(layer: nn.Module, x: Tensor, weight: Weight, name: str, bias: Tensor | None) -> Tensor:
    """x (..., K) -> (..., N) through the layer's scratch space; `name`: of the weight there.

    x has the dtype of the weight's scales where they are bf16, else fp16, or DtypeError.
    """
    plans.check(x, weight, bias)
    scales = weight.fields().get("scales")
    made_for = torch.float16 if scales is None or scales.dtype != torch.bfloat16 else torch.bfloat16
    if x.dtype != made_for:
        expected, got = (str(dtype).removeprefix("torch.") for dtype in (made_for, x.dtype))
        raise DtypeError(f"{name}: x", [expected], got)
    need, scratch = _needs(layer)[name], _given(layer).get(x.device)
    if scratch is None:
        raise NotWarmError(name, str(x.device))
    rows = x.reshape(-1, need.K)
    if rows.shape[0] > scratch.max_input_len:
        raise ArgumentError(
            "x", f"at most {scratch.max_input_len} tokens, as warm_up was told", str(rows.shape[0])
        )
    N, K = need.N, need.K
    at = _aligned(2 * K * N)
    w = scratch.buffer[: 2 * K * N].view(x.dtype).view(N, K)
    sums = scratch.buffer[at : at + 4 * N * rows.shape[0]].view(torch.float32).view(-1, N)
    w.copy_(weight.dequantize())
    with torch.no_grad():
        torch.mm(rows.detach().float(), w.float().T, out=sums)
        if bias is not None:
            sums += bias
    return sums.to(x.dtype).reshape(*x.shape[:-1], N)


def _needs(layer: nn.Module) -> dict[str, ScratchRequest]:
    return getattr(layer, NEEDS, {})


def _given(layer: nn.Module) -> dict[torch.device, ScratchBuffer]:
    return getattr(layer, SCRATCH, {})


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
