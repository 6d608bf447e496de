"""What no kernel can beat, measured in the same run: reading a layer's bytes, the rate of a large product."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qload.kernels.cuda.module import native, stream
from qload.spec import Weight
from tests.bench.timing import microseconds, rounds_of

SQUARE = 8192  # of the product whose rate is the limit of arithmetic
PIECE = 16  # bytes that are read at once
READS = 3


def bytes_of(weight: Weight) -> int:
    """Of codes, scales and whatever else a layer has, each up to whole pieces."""
    return sum(-(-tensor.nbytes // PIECE) * PIECE for tensor in weight.fields().values())


def floor(weights: Sequence[Weight]) -> float:
    """Microseconds of reading as many bytes as each layer has, and nothing else; the best of three."""
    size, sink = bytes_of(weights[0]), torch.zeros(4, dtype=torch.int32, device="cuda")
    pool = torch.randint(-(2**31), 2**31, (len(weights), size // 4), dtype=torch.int32, device="cuda")

    def read(rows: Tensor) -> None:
        native().read(rows.data_ptr(), size, sink.data_ptr(), stream(rows))

    calls, rounds = [partial(read, rows) for rows in pool], rounds_of(len(weights))
    return min(microseconds(calls, rounds=rounds) for _ in range(READS))


def rate() -> float:
    """Multiplications and additions per microsecond of a large fp16 product of random numbers."""
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.float16) for _ in range(2))
    return 2 * SQUARE**3 / microseconds([partial(torch.mm, a, b)])
