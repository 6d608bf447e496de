"""How large what codes mean can be, told by scales and zero points: no code is looked at."""

import torch

from qload.spec import Codes, Weight


def stays_below(weight: Weight, limit: float) -> bool:
    """Whether no value of a quantized weight but NaN can be as far from zero as `limit`, whatever its codes.

    False says nothing: codes may be smaller than they could be, and some weights mean more than their codes.
    """
    if weight.plain or type(weight).dequantize is not Weight.dequantize or not weight.layer.N:
        return False
    codes = weight.codes()
    if not codes.scales.numel():
        return False
    least, most = codes.scales.abs().aminmax()
    scale = float(most)
    if codes.divide:
        scale = 1 / float(least) if float(least) else float("inf")
    return scale * abs(codes.factor) * _farthest(codes) < limit


def _farthest(codes: Codes) -> float:
    """The largest that a code less its zero point can be, or that it stands for."""
    if codes.lookup is not None:
        return float(codes.lookup.abs().nan_to_num(0, torch.inf).max())  # NaN is at no distance
    largest = float(2**codes.bits - 1)
    if codes.zeros is None:
        return largest
    least, most = codes.zeros.aminmax()
    return max(largest - float(least), float(most))
