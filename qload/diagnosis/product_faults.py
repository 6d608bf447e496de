"""Faults that results of products show: inputs rounded to a narrower type, and results of some tokens alone.

One-hot inputs are exact in every type, so a weight that is read back does not show rounded inputs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qload.diagnosis.diagnosis import MIN_ERRORS, MIN_SHARE, Diagnosis

INT8_MAX, UINT8_MAX = 127, 255


def diagnose_product(
    x: Tensor, weight: Tensor, y: Tensor, wrong: Tensor, error: Callable[[Tensor], Tensor]
) -> Diagnosis | None:
    """Name the fault that turns the exact product of x (M, K) and `weight` (N, K) into `y`; None: not known.

    `wrong`: places with a wrong result, bool (M, N); `error`: the largest error of results by their exact
    value, float64.
    """
    exact, count = x.double() @ weight.double().T, int(wrong.sum())
    evident = ~((y.double() - exact).abs() <= error(exact))
    enough = int(evident.sum()) >= MIN_ERRORS
    for fault, text, inputs in rounded_inputs(x.double()) if enough else ():
        value = inputs @ weight.double().T
        close = (y.double() - value).abs() <= error(value)
        share = min(float(close.double().mean()), float(close[evident].double().mean()))
        if share >= MIN_SHARE:
            percent = f"{100 * share:.1f}".removesuffix(".0")
            sentence = f"{text}: explains {percent} % of {count} wrong results of {wrong.numel()}"
            return Diagnosis(fault, sentence, share, count, wrong.numel())
    return diagnose_tokens(wrong)


def rounding_of_sums(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the error of a product by its exact value: sums in float32, and a rounding to `dtype`."""
    sums = torch.finfo(torch.float32).eps * x.shape[1] * (x.double().abs() @ weight.double().abs().T)
    return lambda value: sums + torch.finfo(dtype).eps * value.abs()


def rounded_inputs(x: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Yield roundings of x (M, K): fault, description, the rounded inputs."""
    largest = x.abs().amax(1, keepdim=True)
    for text, reach in (("each token", largest), ("all tokens", largest.amax())):
        for code in (INT8_MAX, INT8_MAX + 1):
            scale = (reach / code).clamp_min(torch.finfo(torch.float32).tiny)
            codes = (x / scale).round().clamp(-code, INT8_MAX)
            yield "inputs-int8", f"inputs rounded to int8, with a scale for {text}", codes * scale
    yield "inputs-int8", "inputs rounded to uint8, with a zero point for each token", _asymmetric(x)
    dtype = torch.float8_e4m3fn
    for text, reach in (("each token", largest), ("all tokens", largest.amax())):
        scale = (reach / torch.finfo(dtype).max).clamp_min(torch.finfo(torch.float32).tiny)
        yield (
            "inputs-fp8",
            f"inputs rounded to e4m3, with a scale for {text}",
            _cast(x / scale, dtype) * scale,
        )
    yield "inputs-fp8", "inputs rounded to e4m3, without a scale", _cast(x, dtype)
    if x.shape[1] % 32 == 0:
        blocks = x.reshape(len(x), -1, 32)
        reach = blocks.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        scale = 2.0 ** (reach.log2().floor() - 8)
        rounded = (_cast(blocks / scale, dtype) * scale).reshape(x.shape)
        yield "inputs-fp8", "inputs rounded to mxfp8, with an exponent for 32 inputs", rounded


def _asymmetric(x: Tensor) -> Tensor:
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = ((high - low) / UINT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    return ((x / scale).round() + zero).clamp(0, UINT8_MAX).sub(zero) * scale


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).float().to(dtype).double()


def diagnose_tokens(wrong: Tensor) -> Diagnosis | None:
    """Name the rows of x with wrong results, if all rows before them are right; None for other errors.

    `wrong`: bool (M, N).
    """
    rows, count = wrong.any(1), wrong.shape[0]
    first = int(rows.double().argmax())
    beyond = rows[first:]
    if not first or int(beyond.sum()) < MIN_ERRORS or float(beyond.double().mean()) < MIN_SHARE:
        return None
    sentence = f"results of rows {first} to {count - 1} of x are wrong, those of the first {first} are right"
    return Diagnosis("tokens", sentence, 1.0, int(wrong.sum()), wrong.numel())
