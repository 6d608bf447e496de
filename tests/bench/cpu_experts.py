"""Experts on a CPU, beside the same dequantized and torch's bfloat16: `python -m tests.bench.cpu_experts`.

8 experts of half of Mixtral's sizes, and 64 of Qwen3 30B's; x in bfloat16. Each turn routes its tokens anew,
and the ways take turns, so that whatever else the machine does meets all of them. `dequantized` is what
multiplies where there is no kernel: each expert that was chosen becomes float32, and torch multiplies. `torch
bfloat16` has each expert as plain bfloat16, and multiplies the rows of each at once. What is ours is checked
before it is timed. On a machine that does other things `--alone` says more: one thread, and the time that the
processor worked for it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from qload import native
from qload.experts import ExpertFacts, ExpertsWeight, GatedActivation, LocalExperts
from qload.experts.weight import stacked
from qload.formats import CTIntConfig, CTIntWeight, Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.kernels import bounds, scaled
from qload.kernels.bounds import excess
from qload.kernels.experts_function import KeptMatrix, routed
from qload.layouts import Stored
from qload.spec import ActivationScheme, Layer, Weight
from tests.bench.alone import Clock, clock_of, parser_of
from tests.bench.cpu_linear import words
from tests.experts import drawn

GROUP = 128
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A layer's sizes: `top` of `experts` for each token, x (M, hidden), `inner` between."""

    hidden: int
    inner: int
    experts: int
    top: int


SHAPES = {"mixtral": Shape(2048, 7168, 8, 2), "qwen3": Shape(2048, 768, 64, 8)}


def panels(layer: Layer, chance: torch.Generator) -> Weight:
    """4 bits with zero points, in panels."""
    K, N = layer.K, layer.N
    weight = GPTQWeight(
        config=GPTQConfig(4, GROUP, zeros=Stored(), positional=True),
        qweight=words(K // 8, N),
        qzeros=words(K // GROUP, N // 8),
        scales=(torch.rand(K // GROUP, N, generator=chance) / (8 * K**0.5)).half(),
        g_idx=(torch.arange(K) // GROUP).int(),
        layer=layer,
    )
    return repack(weight, "panels")


def fp8_of_blocks(layer: Layer, chance: torch.Generator) -> Weight:
    """FP8 of blocks, whose inputs are FP8 too, a scale for each group: as Qwen3's and DeepSeek's."""
    scheme = ActivationScheme("float", 8, True, "group", GROUP)
    codes = torch.randn(layer.N, layer.K, generator=chance).to(torch.float8_e4m3fn)
    scales = torch.rand(layer.N // GROUP, layer.K // GROUP, generator=chance)
    return Fp8Weight(
        Fp8Config("block", (GROUP, GROUP)), codes, scales, layer=replace(layer, activations=scheme)
    )


def int8(layer: Layer, chance: torch.Generator) -> Weight:
    """Int8 whose inputs are int8 too, a scale for each token."""
    scheme = ActivationScheme("int", 8, True, "token")
    codes = torch.randint(-128, 128, (layer.N, layer.K), generator=chance, dtype=torch.int8)
    scales = torch.rand(layer.N, 1, generator=chance) / layer.K**0.5 / 64
    return CTIntWeight(CTIntConfig((1, -1)), codes, scales, layer=replace(layer, activations=scheme))


FORMATS = {
    "panels, 4 bits": panels,
    "MXFP4": drawn.mxfp4,
    "FP8": drawn.fp8,
    "FP8, inputs too": fp8_of_blocks,
    "int8, inputs too": int8,
}


def made(shape: Shape, name: str) -> ExpertsWeight:
    """All experts of a layer in a format."""
    E, H, inner = shape.experts, shape.hidden, shape.inner
    chance, draw = torch.Generator().manual_seed(0), FORMATS[name]
    gate_up = stacked("gate_up", E, drawn.gate_up(draw, E, H, inner, chance))
    down = stacked("down", E, drawn.down(draw, E, H, inner, chance))
    return ExpertsWeight(gate_up, down, ExpertFacts(GatedActivation("silu")), LocalExperts(0, E, E))


def checked(weight: ExpertsWeight, shape: Shape) -> Call:
    """By the module of these experts, once what it computes is within the bound."""
    module: Call = weight.get_linear()
    read = inputs(shape, 3, 0)
    want = bounds.of_experts(*read, weight)
    if not bool((excess(module(*read), want) <= 1).all()):
        raise AssertionError(f"experts of {weight.gate_up.format} are further off than rounding explains")
    return module


def dequantized(call: Call) -> Call:
    """The same without a kernel for the matrices."""

    def without(*read: Tensor) -> Tensor:
        with ExitStack() as stack:
            for owner, name in (
                (KeptMatrix, "multiply"),
                (scaled, "_by_a_kernel"),
                (scaled, "_of_stored_int8"),
            ):
                stack.enter_context(patch.object(owner, name, lambda *given: None))
            return call(*read)

    return without


def plain(weight: ExpertsWeight) -> Call:
    """Experts of plain bfloat16, one after another, all rows of each at once."""
    held = [weight.dequantize(expert, torch.bfloat16) for expert in range(weight.shape[0])]

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape)
        for run in routed(ids, range(len(held))).runs(1):
            gate_up, down = held[run.places[0]]
            tokens, slots = torch.from_numpy(run.tokens), torch.from_numpy(run.slots)
            between = weight.facts.activation(*linear(x[tokens], gate_up).chunk(2, dim=-1))
            total.index_add_(0, tokens, linear(between, down) * weights[tokens, slots][:, None])
        return total.to(x.dtype)

    return call


def inputs(shape: Shape, M: int, turn: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and what a router says of them."""
    chance = torch.Generator().manual_seed(turn)
    x = torch.randn(M, shape.hidden, generator=chance).bfloat16()
    return x, *drawn.choices(M, shape.experts, shape.top, chance)


def rows(shape: Shape, only: list[str], tokens: list[int], rounds: int, clock: Clock) -> Iterator[list[str]]:
    ways: dict[str, Call] = {}
    for name in only:
        weight = made(shape, name)
        ours = checked(weight, shape)
        ways |= {name: ours, f"{name}, dequantized": dequantized(ours)}
        if "torch bfloat16" not in ways:
            ways["torch bfloat16"] = plain(weight)
    for M in tokens:
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            read = inputs(shape, M, turn)
            for name, call in ways.items():
                start = clock()
                call(*read)
                took[name].append(clock() - start)
        beside = min(took["torch bfloat16"][1:])
        for name, times in took.items():
            best = min(times[1:])
            yield [
                str(M),
                name,
                f"{1e3 * best:.2f}",
                f"{1e3 * median(times[1:]):.2f}",
                f"{best / beside:.2f}",
            ]


def main() -> None:
    """Print a table of each shape."""
    parser = parser_of(__doc__, FORMATS, [1, 8, 64], 8)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="may be given several times")
    asked = parser.parse_args()
    clock = clock_of(asked)
    console = Console(width=110)
    for name in asked.shape or SHAPES:
        shape = SHAPES[name]
        title = f"{name}: {shape}, {native.isa()}, {native.threads()} threads"
        table = Table("M", "how", "ms, best", "ms, median", "of torch bfloat16", title=title)
        with torch.no_grad():
            for row in rows(shape, asked.only or list(FORMATS), asked.tokens, asked.rounds, clock):
                table.add_row(*row)
        console.print(table)


if __name__ == "__main__":
    main()
