"""Small layers of experts in strips, stacked, on the device, and what they mean in float64."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from qload import ExpertFacts, ExpertsWeight, GatedActivation, LocalExperts
from qload.experts.weight import stacked
from qload.kernel_formats import StripsWeight
from qload.kernel_formats.strips import StripsConfig
from qload.kernels.cuda.byte_strips import arguments
from qload.kernels.cuda.experts_launches import ExpertMatrix
from qload.layouts import strips
from qload.spec import ActivationScheme, Layer, Weight
from tests.gpu.test_byte_strips import layer as byte_layer

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Gate:
    """The activation between gate and up."""

    kind: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.kind != "clamped_swiglu":
            return ACTIVATIONS[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    @property
    def options(self) -> dict[str, Any]:
        """As `experts.multiply` takes it."""
        return {"activation": self.kind, "alpha": self.alpha, "limit": self.limit}


@dataclass(frozen=True)
class Experts:
    """E experts (H, I): the matrices that kernels get, and each expert's as typed weights.

    `numbers`: the typed weights by matrix, where codes are not integers.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    gate: Gate = Gate()
    numbers: Mapping[str, Sequence[Weight]] | None = None

    def weight(self, name: str, expert: int) -> Weight:
        """`gate_up` (2 I, H) or `down` (H, I) of one expert."""
        if self.numbers is not None:
            return self.numbers[name][expert]
        matrix: ExpertMatrix = getattr(self, name)
        config = StripsConfig(
            matrix.bits, matrix.group_size, matrix.zeros is not None, matrix.perm is not None, True
        )
        held = {
            "qweight": matrix.weights,
            "scales": matrix.scales,
            "qzeros": matrix.zeros,
            "perm": matrix.perm,
        }
        own = {field: tensor[expert] for field, tensor in held.items() if tensor is not None}
        if matrix.perm is not None:
            rows = torch.arange(matrix.rows, device=matrix.weights.device)
            own["g_idx"] = (rows // matrix.group).to(torch.int32)
        layer = Layer((matrix.N,), matrix.K, (matrix.N, matrix.K), f"{name}.{expert}")
        made: StripsWeight = StripsWeight.unchecked(config, layer, own)
        return made

    def dequantized(self, name: str) -> Tensor:
        """float64 (E, N, K)."""
        matrix: ExpertMatrix = getattr(self, name)
        return torch.stack([self.weight(name, e).dequantize().double() for e in range(matrix.experts)])


def drawn(
    E: int,
    H: int,
    inner: int,
    group: int = 128,
    zeros: bool = False,
    *,
    bits: int = 4,
    act_order: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
    exact: bool = False,
    gate: Gate | None = None,
    device: str = "cuda",
) -> Experts:
    """Random experts. `exact`: scales that are powers of two."""
    make = torch.Generator().manual_seed(E + H + inner)
    options: dict[str, Any] = {"zeros": zeros, "act_order": act_order, "bias": bias, "exact": exact}
    shapes = ((2 * inner, H), (H, inner))
    both = [matrix(E, N, K, group, bits, dtype, make, device, **options) for N, K in shapes]
    return Experts(*both, gate or Gate())


def drawn_numbers(
    E: int,
    H: int,
    inner: int,
    per: str,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
    exact: bool = False,
    gate: Gate | None = None,
    device: str = "cuda",
) -> Experts:
    """Random experts of codes and scales `per`, a name of `tests.gpu.test_byte_strips`; biases of a dtype."""
    make = torch.Generator().manual_seed(E + H + inner)
    numbers, matrices = {}, []
    for name, N, K in (("gate_up", 2 * inner, H), ("down", H, inner)):
        weights = [byte_layer(K, N, per, exact=exact, seed=e, device=device) for e in range(E)]
        added = torch.randn(E, N, generator=make).to(device, dtype) if bias else None
        numbers[name] = weights
        matrices.append(stacked_matrix(weights, added))
    return Experts(*matrices, gate or Gate(), numbers)


def stacked_matrix(weights: Sequence[Any], bias: Tensor | None) -> ExpertMatrix:
    """What kernels get of typed weights of numbers, an expert each."""
    read = [arguments(weight.scales, weight) for weight in weights]
    words, scales, columns = (
        None if each[0] is None else torch.stack(each) for each in list(zip(*read, strict=True))[1:4]
    )
    assert words is not None
    assert scales is not None
    *_, N, code, group_size = read[0]
    return ExpertMatrix(words, scales, columns, None, bias, N, weights[0].layer.K, code, group_size or -1)


def typed_experts(
    held: Experts,
    facts: ExpertFacts | None = None,
    local: LocalExperts | None = None,
    scheme: ActivationScheme | None = None,
) -> ExpertsWeight:
    """The same as a typed weight; `scheme`: quantization of all inputs."""
    E, stacks = held.down.experts, []
    for name, parts in (("gate_up", (held.down.K, held.down.K)), ("down", (held.down.N,))):
        weights = [held.weight(name, e) for e in range(E)]
        layers = [replace(each.layer, parts=parts, activations=scheme) for each in weights]
        each = (
            type(one).unchecked(one.config, own, one.fields())
            for one, own in zip(weights, layers, strict=True)
        )
        stacks.append(stacked(f"experts.{name}", E, each))
    silu, biases = ExpertFacts(GatedActivation("silu")), (held.gate_up.bias, held.down.bias)
    return ExpertsWeight(*stacks, facts or silu, local or LocalExperts(0, E, E), *biases)


def matrix(
    E: int,
    N: int,
    K: int,
    group: int,
    bits: int,
    dtype: torch.dtype,
    make: torch.Generator,
    device: str = "cuda",
    **options: bool,
) -> ExpertMatrix:
    """One matrix of each expert; what lies in its padding is random too, but for rows that no input has."""
    rows, columns = -(-K // strips.TILE_K) * strips.TILE_K, -(-N // strips.TILE_N) * strips.TILE_N
    groups = 1 if group == -1 else rows // group
    words = torch.randint(-(2**31), 2**31, (E, columns // 64, rows * bits * 2), generator=make)
    if options["exact"]:
        scales = 2.0 ** torch.randint(-3, 0, (E, groups, columns), generator=make)
    else:
        scales = (torch.rand(E, groups, columns, generator=make) * 0.02 + 0.001) / 2 ** (bits - 4)
    points = torch.randint(-(2**31), 2**31, (E, groups, columns * bits // 32), generator=make)
    beyond = torch.arange(K, rows)  # no input has these rows
    order = torch.stack([torch.cat([torch.randperm(K, generator=make), beyond]) for _ in range(E)])
    bias = torch.randn(E, N, generator=make)
    return ExpertMatrix(
        words.to(device, torch.int32),
        scales.to(device, dtype),
        points.to(device, torch.int32) if options["zeros"] else None,
        order.to(device, torch.int32) if options["act_order"] else None,
        bias.to(device, dtype) if options["bias"] else None,
        N,
        K,
        bits,
        group,
    )


@dataclass(frozen=True)
class Tokens:
    """x (M, H), and of each token the experts it chose and their weights (M, top)."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    def rows(self, rows: Any) -> "Tokens":
        """Some of them."""
        return Tokens(self.x[rows], self.ids[rows], self.weights[rows])


def tokens(M: int, H: int, top: int, total: int, dtype: torch.dtype, seed: int = 0) -> Tokens:
    """Random ones, whose experts differ."""
    make = torch.Generator().manual_seed(M + seed)
    ids = torch.rand(M, total, generator=make).topk(top).indices
    weights = torch.rand(M, top, generator=make).softmax(1)
    return Tokens(torch.randn(M, H, generator=make).to(dtype).cuda(), ids.cuda(), weights.cuda())
