"""What every linear kernel promises of a call: which memory it touches, the same bits, streams, graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from qload.kernels import cuda
from qload.kernels.cuda import exllama, marlin, strips
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.gpu import exllama_layers
from tests.gpu.layers import inputs, layer
from tests.gpu.replays import assert_replays

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Caller:
    """A kernel, layers (K, N) that it reads, and numbers of tokens on both sides of its borders."""

    kernel: str
    linear: Callable[..., Tensor]
    make: Callable[[int, int], Weight]
    tokens: tuple[int, ...]
    depth: int = 10  # of layers one after another whose results stay in range

    def __call__(self, x: Tensor, weight: Weight) -> Tensor:
        return self.linear(x, weight, kernel=self.kernel)


def grouped(K: int, N: int, bits: int = 4, layout: str = "marlin") -> Weight:
    return layer(K, N, 128, True, bits=bits, layout=layout)


def shuffled(K: int, N: int, bits: int, group: int = 48) -> Weight:
    return exllama_layers.layer(K, N, group, bits)


FEW = {"marlin": (1, 8, 9, 16), "strips": (1, 8, 9, 16, 17, 24)}
MORE, MIDDLE = (1, 8, 16, 33, 64), (17, 33, 64, 128, 256)
DEPTH = {2: 10, 3: 10, 4: 10, 8: 3}
CALLERS = pytest.mark.parametrize(
    "caller",
    [
        *(
            pytest.param(
                Caller(kernel, way, partial(grouped, bits=bits, layout=layout), tokens, DEPTH[bits]),
                id=f"{kernel}, {layout}, {bits} bits",
            )
            for kernel, tokens in (("many", MIDDLE), ("mma", MIDDLE), ("large", (1, 65)))
            for layout, way in (("marlin", marlin.linear), ("strips", strips.linear))
            for bits in (4, 8)
            if kernel == "large" or layout == "strips"
        ),
        *(
            pytest.param(
                Caller("decode", way, partial(grouped, bits=bits, layout=layout), FEW[layout], DEPTH[bits]),
                id=f"decode, {layout}, {bits} bits",
            )
            for layout, way in (("marlin", marlin.linear), ("strips", strips.linear))
            for bits in (4, 8)
        ),
        *(
            pytest.param(
                Caller("few", exllama.linear, partial(shuffled, bits=bits), MORE, DEPTH[bits]),
                id=f"exllama, {bits} bits",
            )
            for bits in (2, 3, 4, 8)
        ),
    ],
)


@pytest.fixture(autouse=True)
def _fits(caller: Caller) -> None:
    reason = cuda.why_not()
    if reason is None and caller.kernel == "many" and torch.cuda.get_device_capability()[0] != 9:
        reason = "needs a device of capability 9.0"
    if reason:
        pytest.skip(reason)


@CALLERS
def test_only_the_rows_of_a_token_reach_it(caller: Caller) -> None:
    weight = caller.make(1024, 320)
    for M in caller.tokens:
        x = inputs(M, weight, torch.float16)
        memory = torch.full((M + 2, 1024), torch.nan, device="cuda", dtype=torch.float16)
        memory[1:-1] = x

        assert_same_bits(caller(memory[1:-1], weight), caller(x, weight))


@CALLERS
def test_x_at_an_odd_address_is_read_as_it_lies(caller: Caller) -> None:
    weight = caller.make(1024, 320)
    for M in caller.tokens:
        x = inputs(M, weight, torch.float16)
        moved = torch.empty(M * 1024 + 1, device="cuda", dtype=torch.float16)[1:].view(M, 1024).copy_(x)

        assert_same_bits(caller(moved, weight), caller(x, weight))


@CALLERS
def test_a_hundred_runs_have_the_same_bits(caller: Caller) -> None:
    weight = caller.make(4096, 1024)
    for M in caller.tokens:
        x = inputs(M, weight, torch.float16)
        want = caller(x, weight)

        for _ in range(100):
            assert_same_bits(caller(x, weight), want)


@CALLERS
def test_layers_one_after_another_in_a_graph_see_each_other(caller: Caller) -> None:
    """What a kernel reads the kernel before has written, though it may start before that ends."""
    weights = [caller.make(1024, 1024), caller.make(1024, 1024)]
    x = inputs(caller.tokens[0], weights[0], torch.float16) / 64

    def chain() -> Tensor:
        y = x
        for i in range(caller.depth):
            y = caller(y, weights[i % 2])
        return y

    assert_replays(chain)


@CALLERS
def test_two_streams_do_not_meet(caller: Caller) -> None:
    weight = caller.make(2048, 1024)
    x = [inputs(M, weight, torch.float16) for M in (caller.tokens[0], caller.tokens[-1])]
    want = [caller(each, weight) for each in x]
    streams, got = [torch.cuda.Stream(), torch.cuda.Stream()], []

    torch.cuda.synchronize()
    for _ in range(50):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                got.append((i, caller(x[i], weight)))
    torch.cuda.synchronize()

    for i, y in got:
        assert_same_bits(y, want[i])
