"""`ExpertsWeight` on a GPU: its module takes tokens through the kernel, and means what plain torch means."""

import pytest
import torch
from torch import Tensor

from qload import AWQConfig, AWQWeight, ExpertFacts, ExpertsWeight, GatedActivation, LocalExperts
from qload.experts.weight import stacked
from qload.kernels.cuda import experts, why_no_experts
from qload.spec import Layer
from qload.testing import assert_same_bits
from tests.gpu.layers import DTYPES

pytestmark = pytest.mark.gpu
E, H, INNER, GROUP = 6, 256, 192, 32
SILU = ExpertFacts(GatedActivation("silu"))


@pytest.fixture(autouse=True)
def _fits() -> None:
    reason = experts.why_not(torch.device("cuda"))
    if reason:
        pytest.skip(reason)


def awq(parts: tuple[int, ...], K: int, name: str, seed: int, dtype: torch.dtype) -> AWQWeight:
    make, N = torch.Generator().manual_seed(seed), sum(parts)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=make, dtype=torch.int64).to(torch.int32)

    scales = (torch.rand(K // GROUP, N, generator=make) * 0.02 + 0.001).to(dtype)
    return AWQWeight(
        config=AWQConfig(GROUP),
        qweight=words(K, N // 8),
        qzeros=words(K // GROUP, N // 8),
        scales=scales,
        layer=Layer(parts, K, (N, K), name),
    )


def layer(dtype: torch.dtype, facts: ExpertFacts = SILU, bias: bool = False) -> ExpertsWeight:
    ups = (awq((INNER, INNER), H, f"experts.{e}.gate_up", e, dtype) for e in range(E))
    downs = (awq((H,), INNER, f"experts.{e}.down", 100 + e, dtype) for e in range(E))
    make = torch.Generator().manual_seed(7)
    biases = (
        [torch.randn(E, size, generator=make).to(dtype) for size in (2 * INNER, H)] if bias else [None] * 2
    )
    return ExpertsWeight(
        stacked("experts.gate_up", E, ups),
        stacked("experts.down", E, downs),
        facts,
        LocalExperts(0, E, E),
        *biases,
    )


def chosen(M: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(M)
    ids = torch.stack([torch.randperm(E, generator=make)[:2] for _ in range(M)])
    return torch.randn(M, H, generator=make).to(dtype), ids, torch.rand(M, 2, generator=make)


def there(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.cuda() for tensor in tensors)


@DTYPES
@pytest.mark.parametrize("M", [1, 5, 33])
@pytest.mark.parametrize(
    ("facts", "bias"),
    [
        (SILU, False),
        (ExpertFacts(GatedActivation("gelu")), True),
        (ExpertFacts(GatedActivation("clamped_swiglu", 1.702, 7.0)), True),
        (ExpertFacts(GatedActivation("silu"), "input"), False),
    ],
    ids=["silu", "gelu and biases", "clamped and biases", "weights on the input"],
)
def test_the_module_is_within_a_rounding_of_plain_torch(
    facts: ExpertFacts, bias: bool, M: int, dtype: torch.dtype
) -> None:
    weight, read = layer(dtype, facts, bias), chosen(M, dtype)
    made = weight.repack("strips").to("cuda")
    assert why_no_experts(made, dtype, torch.device("cuda")) is None

    y = made.get_linear()(*there(*read))

    x, ids, weights = read
    want = weight.get_linear()(x.double(), ids, weights.double())
    # Of few tokens nothing is rounded between x and y but h, and that reaches y by |down|.
    slack = torch.zeros_like(want)
    for token in range(M):
        for slot in range(2):
            gate_up, down = weight.dequantize(int(ids[token, slot]))
            size = gate_up.double().abs() @ x[token].double().abs()
            h = (size[:INNER] + 8) * (size[INNER:] + 8)
            slack[token] += (down.double().abs() @ h) * torch.finfo(dtype).eps
    assert bool(((y.cpu().double() - want).abs() <= slack + want.abs() * torch.finfo(dtype).eps).all())


@DTYPES
def test_ranks_that_share_experts_out_add_up_to_the_whole(dtype: torch.dtype) -> None:
    weight, read = layer(dtype).repack("strips").to("cuda"), there(*chosen(4, dtype))
    parts = []
    for start, stop in ((0, 2), (2, E)):
        local = LocalExperts(start, stop, E)
        stacks = [
            stacked(name, stop - start, list(getattr(weight, name))[start:stop])
            for name in ("gate_up", "down")
        ]
        parts.append(ExpertsWeight(*stacks, SILU, local).get_linear()(*read))

    whole = weight.get_linear()(*read)

    got = parts[0].double() + parts[1].double()
    bound = torch.finfo(dtype).eps * (parts[0].abs() + parts[1].abs() + whole.abs()).double()
    assert bool(((got - whole.double()).abs() <= bound).all())


def test_a_number_of_no_expert_is_never_a_result_that_looks_right() -> None:
    weight, (x, ids, weights) = layer(torch.float16), chosen(3, torch.float16)
    module = weight.repack("strips").to("cuda").get_linear()
    ids[1, 0] = E

    y = module(*there(x, ids, weights))

    assert y.isnan().all(1).tolist() == [False, True, False]


def test_the_module_is_captured_in_a_graph_and_replayed() -> None:
    module = layer(torch.float16).repack("strips").to("cuda").get_linear()
    read = there(*chosen(3, torch.float16))
    want = module(*read)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(*read)

    y.fill_(torch.nan)
    graph.replay()

    assert_same_bits(y, want)


def test_what_the_kernel_does_not_take_goes_the_plain_way() -> None:
    weight = layer(torch.float16).to("cuda")  # as AWQ stores it
    x, ids, weights = there(*chosen(2, torch.float16))

    assert "no kernel reads experts as awq" in str(why_no_experts(weight, torch.float16, x.device))
    assert bool(weight.get_linear()(x, ids, weights).isfinite().all())
