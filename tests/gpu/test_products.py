"""What no kernel takes, on a GPU: every format within its bound, schemes, memory and settings as said."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qload.kernels import bounds, plans, products, scaled
from qload.kernels.activations import quantize
from qload.kernels.bounds import excess
from qload.spec import ActivationScheme, Weight
from tests.bench import cell_layers
from tests.bench.cell_layers import LAYERS

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_layer = pytest.mark.parametrize("name", LAYERS)
SETTINGS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


def inputs(M: int, K: int, dtype: torch.dtype) -> Tensor:
    make = torch.Generator(device="cuda").manual_seed(M)
    return torch.randn(M, K, device="cuda", generator=make).to(dtype)


def assert_within(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Half a unit for the weight, for inputs that are quantized and for y; K sums; e4m3's own sums."""
    __tracebackhide__ = True
    assert y.dtype == x.dtype
    assert bool((excess(y, bounds.of_linear(x, weight, bias)) <= 1).all())


@every_layer
@every_dtype
def test_every_layer_multiplies_every_x(name: str, dtype: torch.dtype) -> None:
    weight, bias = LAYERS[name](1024, 512), torch.randn(1024, device="cuda").to(dtype)
    for M in (1, 8, 40, 300):
        x = inputs(M, 512, dtype)
        assert_within(plans.multiply(x, weight), x, weight)
        assert_within(plans.multiply(x, weight, bias), x, weight, bias)
    assert plans.multiply(x[:0], weight).shape == (0, 1024)


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("w8a8")])
@every_dtype
def test_shapes_that_the_vendor_refuses_keep_their_scheme(name: str, dtype: torch.dtype) -> None:
    K = 384 if "block" in name or "mx" in name else 200
    weight, x = LAYERS[name](136, K), inputs(3, K, dtype)

    assert_within(plans.multiply(x, weight), x, weight)
    assert_within(plans.multiply(x[:, :].T.contiguous().T, weight), x, weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("M", [1, 16, 17, 33])
def test_sums_of_int8_are_exact(M: int, symmetric: bool) -> None:
    scheme = ActivationScheme("int", 8, True, "token", symmetric=symmetric)
    stored = LAYERS["ct int8 channel"](256, 512).fields()["weight"]
    made = quantize(inputs(M, 512, torch.float32) + 2, scheme)

    got = scaled.of_int8(made, stored)

    assert torch.equal(got.double(), made.counted().double() @ stored.double().T)


@pytest.fixture
def _allowed() -> Iterator[None]:
    """A program that lets partial sums of its own be narrow."""
    flags = torch.backends.cuda.matmul
    before = {name: getattr(flags, name) for name in SETTINGS if hasattr(flags, name)}
    for name in before:
        setattr(flags, name, True)
    yield
    changed = [name for name in before if getattr(flags, name) is not True]
    for name, was in before.items():
        setattr(flags, name, was)
    assert not changed


@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("M", [1, 16, 300])
def test_sums_are_in_float32_whatever_a_program_allows(dtype: torch.dtype, M: int) -> None:
    """Of numbers that are all positive, whose sums 16 bits do not hold."""
    make = torch.Generator(device="cuda").manual_seed(M)
    x, w = (torch.rand(rows, 16384, device="cuda", generator=make).to(dtype) for rows in (M, 64))

    found = products.torch_product(x, w)

    exact, info, steps = x.double() @ w.double().T, torch.finfo(dtype), 16384 * 2.0**-24
    assert bool(((found.double() - exact).abs() <= (steps + info.eps / 2 * (1 + steps)) * exact).all())


@every_layer
def test_a_call_asks_for_no_more_than_was_said(name: str) -> None:
    weight, x = LAYERS[name](8192, 8192), inputs(64, 8192, torch.float32)
    plans.multiply(x.half(), weight)
    for dtype in DTYPES:
        taken = x.to(dtype)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()

        y = plans.multiply(taken, weight)

        assert torch.cuda.max_memory_allocated() - before - y.nbytes <= 256 << 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_graph_replays_a_call_of_every_layer_that_waits_for_nothing(dtype: torch.dtype) -> None:
    for name in (
        "fp8 channel",
        "nf4",
        "nvfp4",
        "mxfp4",
        "ct pack tensor",
        "w8a8 int8 token",
        "w8a8 fp8 token",
    ):
        weight, x = cell_layers.LAYERS[name](512, 512), inputs(8, 512, dtype)
        stream = torch.cuda.Stream()
        want = plans.multiply(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = plans.multiply(x, weight)
        got.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want), name


@pytest.mark.parametrize("M", [1, 2, 3, 4, 5, 8, 9, 15, 16])
@pytest.mark.parametrize(("N", "K"), [(1, 4), (15, 252), (16, 256), (17, 260), (4099, 1024)])
def test_few_tokens_in_float32_are_summed_exactly_where_sums_are(M: int, N: int, K: int) -> None:
    """Of small whole numbers, into a part of wider rows, of which nothing else is written."""
    make = torch.Generator(device="cuda").manual_seed(M)
    x, w = (torch.randint(-8, 9, (rows, K), device="cuda", generator=make).float() for rows in (M, N))
    bias, wide = torch.arange(N, device="cuda").float(), x.new_full((M + 1, N + 3), torch.nan)

    for added in (None, bias):
        assert products.multiply_floats(wide[:M, 2 : N + 2], x, w, added)

        exact = x.double() @ w.double().T + (0 if added is None else added.double())
        assert torch.equal(wide[:M, 2 : N + 2].double(), exact)
        assert wide[:M, :2].isnan().all()
        assert wide[:M, N + 2 :].isnan().all()
        assert wide[M:].isnan().all()


def test_few_tokens_in_float32_spoil_no_other_and_repeat_their_bits() -> None:
    make = torch.Generator(device="cuda").manual_seed(1)
    x, w = (torch.randn(rows, 1000, device="cuda", generator=make) for rows in (8, 333))
    first, second = (x.new_empty(8, 333) for _ in range(2))
    assert products.multiply_floats(first, x, w, None)
    exact, steps = x.double() @ w.double().T, 1000 * 2.0**-24
    room = steps / (1 - steps) * (x.double().abs() @ w.double().abs().T)
    assert bool(((first.double() - exact).abs() <= room).all())

    spoiled = x.clone()
    spoiled[3] = torch.nan
    assert products.multiply_floats(second, spoiled, w, None)

    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(first[others], second[others])
    assert second[3].isnan().all()


def test_more_tokens_and_rows_between_two_loads_are_left_to_the_vendor() -> None:
    w, y = torch.ones(8, 64, device="cuda"), torch.empty(17, 8, device="cuda")
    flat = torch.ones(3 * 64 + 1, device="cuda")

    assert not products.multiply_floats(y, torch.ones(17, 64, device="cuda"), w, None)
    assert not products.multiply_floats(y[:3], torch.ones(3, 62, device="cuda"), w[:, :62].contiguous(), None)
    assert not products.multiply_floats(y[:3], flat[1:].view(3, 64), w, None)
    assert torch.equal(
        products.torch_product(flat[1:].view(3, 64), w), torch.full((3, 8), 64.0, device="cuda")
    )
