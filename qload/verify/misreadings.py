"""A quantized weight as programs that get it wrong would read it, to name what is wrong with a file."""

from dataclasses import replace

import torch
from torch import Tensor

from qload.spec import Codes, Weight

EVEN_FIRST = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight codes in a word
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)  # the two codes of a byte, the high one first


def other_readings(weight: Weight) -> dict[str, Tensor]:
    """The mistake that a file may hold, in words -> (N, K) float32 with that mistake taken back."""
    if weight.format == "unquantized":
        return {}
    codes = weight.codes()
    readings = {**_zeros(codes), **_scales(codes), **_orders(codes)}
    return {mistake: reading.dequantize() for mistake, reading in readings.items()}


def _zeros(codes: Codes) -> dict[str, Codes]:
    if codes.zeros is None:
        return {}
    return {
        "zero points one lower": replace(codes, zeros=codes.zeros - 1),
        "zero points one higher": replace(codes, zeros=codes.zeros + 1),
    }


def _scales(codes: Codes) -> dict[str, Codes]:
    if codes.scales.shape[1] < 2:
        return {}
    return {
        "scales of the group before": replace(codes, scales=codes.scales.roll(1, 1)),
        "scales of the group after": replace(codes, scales=codes.scales.roll(-1, 1)),
    }


def _orders(codes: Codes) -> dict[str, Codes]:
    readings = {}
    for axis, letter in ((1, "K"), (0, "N")):
        size = codes.codes.shape[axis]
        if size % len(EVEN_FIRST):
            continue
        order = torch.tensor(EVEN_FIRST)
        ways = {"even codes first": order, "even codes first undone": order.argsort()}
        for words, way in {**ways, "codes of a byte swapped": torch.tensor(SWAPPED)}.items():
            index = (torch.arange(0, size, 8)[:, None] + way).flatten()
            readings[f"{words} along {letter}"] = replace(
                codes, codes=codes.plain().index_select(axis, index)
            )
    return readings
