"""Quantized inputs and scaled sums, as in csrc/cuda/quantize/quantize.h, on memory of the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.devices.tensors import FLOATS
from qload.kernels.activations import QuantizedActivations, quantize
from qload.kernels.quantized_inputs import MadeInputs
from qload.spec import ActivationScheme
from tests.kernels.cuda_by_hand import STREAM, Hand, at

LARGEST, INVERSE, INVERSE_ONE, POWERS_NEAR, POWERS_UP, ASYMMETRIC, STORED, E4M3_OVER, E4M3_TIMES = range(9)
OWNERS = {INVERSE: "fbgemm", INVERSE_ONE: "modelopt", POWERS_UP: "modelopt", E4M3_TIMES: "modelopt"}
READS_STORED = (STORED, E4M3_OVER, E4M3_TIMES)
CODES, COUNTED, MEANT, PERMUTED = range(4)


class OnDevice(Tensor):
    """A CPU tensor under the name of a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def of_each(tokens: list[QuantizedActivations]) -> MadeInputs:
    """Tokens that were quantized one by one."""
    codes, scales, steps = (
        torch.cat([getattr(each, name).reshape(1, -1) for each in tokens])
        for name in ("codes", "scales", "steps")
    )
    return MadeInputs(QuantizedActivations(codes, scales, steps, None))


class HandOfInputs(Hand):
    """A rule by its number is a scheme, whose codes plain torch finds."""

    def quantizer(
        self, kind, K, rule, most, bound, becoming, types, scale_each, ones, each
    ) -> Callable[..., bool]:
        finding, size, every, whole, bits = rule
        scheme = scheme_of(*rule, bound)
        levels = 2**bits - 1 if finding == ASYMMETRIC else (2**bits - 1) / 2
        assert K % 8 == 0
        assert finding == STORED or most == (levels if whole else 448.0 if bits == 8 else 6.0)

        def start(x, M, pitch, scale, zero, written, out, steps, zeros, powers, scratch, stream) -> bool:
            assert stream == STREAM
            taken = at(x, FLOATS[kind], (M - 1) * pitch + K).as_strided((M, K), (pitch, 1))
            pointers = zip((scale, zero), types, strict=True)
            stored = [
                at(pointer, (*FLOATS, torch.int8)[kind], 1) if pointer else None for pointer, kind in pointers
            ]
            assert finding in READS_STORED or stored == [None, None]
            if scale_each:
                of_rows = at(scale, torch.float32, M)
                found = of_each(
                    [quantize(row[None], scheme, own) for row, own in zip(taken, of_rows, strict=True)]
                )
            else:
                found = MadeInputs(quantize(taken, scheme, *stored))
            has_zeros = found.has_zeros and not each  # of a result that they were taken from
            assert (bool(zeros), bool(powers), ones) == (has_zeros, becoming[0] == MEANT, has_zeros)
            assert bool(scratch) == (every and (M > 1 or each))
            if scratch:
                at(scratch, torch.int32, 2, M).zero_()
            if becoming[0] == CODES:
                dtype = torch.int8 if whole else torch.float8_e4m3fn
                at(out, torch.uint8, written, K).copy_(found.codes(dtype, written).view(torch.uint8))
            elif becoming[0] == PERMUTED:
                dtype, padding = torch.int8 if whole else torch.float8_e4m3fn, -K % 32
                assert size == 0
                codes = pad(found.codes(dtype).view(torch.uint8), (0, padding))
                permuted = codes.view(M, -1, 4, 2, 4).transpose(2, 3).reshape(M, -1)
                at(out, torch.uint8, M, K + padding).copy_(permuted)
            elif becoming[0] == COUNTED:
                at(out, FLOATS[becoming[1]], M, K).copy_(found.counted(FLOATS[becoming[1]]))
            else:
                values, row = found.meant(FLOATS[becoming[1]])
                at(out, FLOATS[becoming[1]], M, K).copy_(values)
                at(powers, torch.float32, M, 1).copy_(row)
            assert bool(steps) == (not each or size == 0)
            if steps:
                shape = (M, 1) if each else found.steps.shape
                at(steps, torch.float32, *shape).copy_(found.steps)
            if zeros:
                at(zeros, torch.float32, *found.zero_points.shape).copy_(found.zero_points)
            self.called.append("quantize")
            return pitch % 16 == 0

        return start

    def scale_sums(self, found, whole, sizes, row, column, zeros, bias, y, kind, stream) -> bool:
        M, N, pitch = sizes
        assert (N % 4, stream) == (0, STREAM)
        sums = at(found, torch.int32 if whole else torch.float32, M + bool(whole and zeros[0]), N)
        made = sums[:M].double()
        if zeros[0]:
            made = made - _each(zeros, M, 1) * sums[M].double()
        made = made.float().double() * _each(row, M, 1)
        made = made.float() if not column[0] else (made.float().double() * _each(column, N)).float()
        if bias[0]:
            made = made + at(bias[0], FLOATS[bias[1]], N).float()
        at(y, FLOATS[kind], (M - 1) * pitch + N).as_strided((M, N), (pitch, 1)).copy_(made)
        return True


def _each(factors: tuple[int, bool], *shape: int) -> Tensor:
    pointer, many = factors
    return (at(pointer, torch.float32, *shape) if many else at(pointer, torch.float32, 1)).double()


def scheme_of(finding: int, size: int, every: bool, whole: bool, bits: int, bound: float) -> ActivationScheme:
    """The scheme of a rule."""
    how: dict[str, Any] = {"owner": OWNERS[finding]} if finding in OWNERS else {}
    if finding in (POWERS_NEAR, POWERS_UP):
        how["scale_type"] = "e8m0"
    if finding in READS_STORED:
        how["scale"] = "input_scale"
    if finding in (E4M3_OVER, E4M3_TIMES):
        how["scale_type"] = "e4m3"
    strategy = ("group", size) if size else ("tensor" if every or finding == STORED else "token",)
    return ActivationScheme(
        "int" if whole else "float", bits, finding != STORED, *strategy,  # type: ignore[arg-type]
        symmetric=finding != ASYMMETRIC, upper_bound=bound or None, **how,
    )  # fmt: skip
