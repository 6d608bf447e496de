"""Linears on a CPU beside torch's own: `nox -s bench`, or `python -m tests.bench.cpu_linear`.

A layer of 4096 inputs and 14336 outputs, x in bfloat16. Each way has as many copies of the layer as make
1 GiB, so that no cache holds one, and the ways take turns, so that whatever else the machine does meets all
of them. All lie in large pages where the system has such, as weights do that qload loads. `of reading` is
the share of the rate at which torch reads as many bytes as the way's own, from large pages too, in the
same turns. What is ours is checked before it is timed. On a machine that does other things `--alone` says
more: one thread, and the time that the processor worked for it. With `--peers` torchao, bitsandbytes and
llama.cpp take turns with the ways that are like theirs, if installed: `nox -s bench -- peers` does that.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from qload import native
from qload.devices import in_large_pages
from qload.formats import (
    BNB4Config,
    BNBNF4Weight,
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    Fp8Config,
    Fp8Weight,
    GGUFConfig,
    GGUFWeight,
    GPTQConfig,
    GPTQWeight,
    MLXConfig,
    MLXWeight,
    MXFP4Config,
    NVFP4Config,
)
from qload.kernel_formats import repack
from qload.kernels import cpu, products
from qload.kernels.bounds import excess, of_linear
from qload.kernels.cpu import KeptRows
from qload.layouts import Stored
from qload.layouts.bnb import TABLES
from qload.layouts.ggml_grids import sample_blocks
from qload.spec import ActivationScheme, Layer, Weight
from qload.storage import BLOCK_TYPES
from qload.testing import assert_within_bound
from tests.bench.alone import Clock, clock_of, parser_of
from tests.bench.cpu_peers import PEERS

K, N, GROUP = 4096, 14336, 128
ROTATE = 1 << 30
Calls = list[Callable[[Tensor], Tensor]]


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def loaded(tensor: Tensor) -> Tensor:
    """A copy that lies as a loaded tensor does: in large pages."""
    return in_large_pages(torch.empty_like(tensor)).copy_(tensor)


def gptq(bits: int) -> GPTQWeight:
    """Random codes and zero points, scales such that outputs stay small."""
    groups = K // GROUP
    return GPTQWeight(
        config=GPTQConfig(bits, GROUP, zeros=Stored(), positional=True),
        qweight=words(K * bits // 32, N),
        qzeros=words(groups, N * bits // 32),
        scales=(torch.rand(groups, N) * 2.0**-bits).to(torch.float16),
        g_idx=(torch.arange(K) // GROUP).to(torch.int32),
    )


def ours(made: list[Any]) -> Calls:
    """By the CPU module, what is right; each layer keeps what its codes mean."""
    kept = {id(weight): KeptRows() for weight in made}

    def call(x: Tensor, weight: Any) -> Tensor:
        y = cpu.multiply(x, weight, kept=kept[id(weight)])
        if y is None:  # what this module leaves to torch
            y = products.multiply(x, weight)
        return y

    assert_within_bound(partial(call, weight=made[0]), made[0], torch.randn(3, K).bfloat16())
    return [partial(call, weight=weight) for weight in made]


def fp8() -> Calls:
    """Ours, as it is stored; a scale for each output."""
    count = -(-ROTATE // (K * N))
    weight = torch.randn(N, K).to(torch.float8_e4m3fn)
    config, scales = Fp8Config("channel"), torch.rand(N, 1)
    return ours([Fp8Weight(config=config, weight=loaded(weight), weight_scale=scales) for _ in range(count)])


def mxfp4() -> Calls:
    """Ours, as it is stored; an exponent for each 32 inputs."""
    made = list[Any]()
    for _ in range(-(-ROTATE // (K * N // 2))):
        codes = loaded(torch.randint(0, 256, (N, K // 2), dtype=torch.uint8))
        scales = torch.randint(120, 126, (N, K // 32), dtype=torch.uint8)
        made.append(CTMXFP4Weight(config=MXFP4Config(), weight_packed=codes, weight_scale=scales))
    return ours(made)


def nvfp4() -> Calls:
    """Ours, as it is stored; a float of 8 bits for each 16 inputs, divided by one for all."""
    made = list[Any]()
    for _ in range(-(-ROTATE // (K * N // 2))):
        codes = loaded(torch.randint(0, 256, (N, K // 2), dtype=torch.uint8))
        scales = (torch.rand(N, K // 16) + 1).to(torch.float8_e4m3fn)
        made.append(CTNVFP4Weight(NVFP4Config(), codes, scales, torch.tensor([64.0])))
    return ours(made)


def nf4() -> Calls:
    """Ours, as it is stored; a scale for each 64 inputs."""
    config, made = BNB4Config("nf4", K=K), list[Any]()
    for _ in range(-(-ROTATE // (K * N // 2))):
        codes = loaded(torch.randint(0, 256, (N * K // 2, 1), dtype=torch.uint8))
        scales = torch.rand(N * K // config.blocksize)
        table = torch.tensor(TABLES["nf4"])
        made.append(BNBNF4Weight(config=config, weight=codes, absmax=scales, quant_map=table))
    return ours(made)


def int8() -> Calls:
    """Ours, as it is stored; a scale for each output."""
    made = list[Any]()
    for _ in range(-(-ROTATE // (K * N))):
        codes, scales = loaded(torch.randint(-128, 128, (N, K), dtype=torch.int8)), torch.rand(N, 1)
        made.append(CTIntWeight(config=CTIntConfig((1, -1)), weight=codes, weight_scale=scales))
    return ours(made)


def int8_inputs() -> Calls:
    """Ours, whose inputs become int8 too, a scale for each token; what is found is within its bound."""
    scheme, made = ActivationScheme("int", 8, True, "token"), list[Any]()
    for _ in range(-(-ROTATE // (K * N))):
        codes, scales = loaded(torch.randint(-128, 128, (N, K), dtype=torch.int8)), torch.rand(N, 1)
        layer = Layer((N,), K, (N, K), "up", activations=scheme)
        made.append(
            CTIntWeight(
                config=CTIntConfig((1, -1)), weight=codes, weight_scale=scales, layer=layer
            ).get_linear()
        )
    x = torch.randn(3, K).bfloat16()
    if not bool((excess(made[0](x), of_linear(x, made[0].typed)) <= 1).all()):
        raise AssertionError("int8 inputs are further off than rounding explains")
    return made


def panels(weight: Weight, bits: int) -> Calls:
    """Ours, in panels."""
    packed = repack(weight, "panels")
    copies = -(-ROTATE // (K * N * bits // 8))
    return ours(
        [
            packed.holding({name: loaded(tensor) for name, tensor in packed.fields().items()})
            for _ in range(copies)
        ]
    )


def mlx() -> MLXWeight:
    """Random codes, scales and biases, for each 64 inputs."""
    scales = torch.rand(N, K // 64).bfloat16()
    return MLXWeight(
        config=MLXConfig(4, 64),
        weight=words(N, K // 8).view(torch.uint32),
        scales=scales / 16,
        biases=-scales / 2,
    )


def gguf(kind: str) -> GGUFWeight:
    """Random codes and small scales, in blocks of 256 inputs."""
    blocks = sample_blocks(kind, N, K // 256, BLOCK_TYPES[kind].nbytes)
    return GGUFWeight(config=GGUFConfig(kind), blocks=blocks)


def dequantized(weight: Weight) -> Calls:
    """By torch's product, after dequantizing the weight."""
    return [partial(products.multiply, weight=weight)]


def plain(dtype: torch.dtype) -> Calls:
    """torch's linear of a plain weight."""
    made = [loaded(torch.randn(N, K).to(dtype)) for _ in range(-(-ROTATE // (K * N * dtype.itemsize)))]
    return [lambda x, weight=weight: linear(x.to(dtype), weight) for weight in made]  # type: ignore[misc]


def int4pack() -> Calls:
    """torch's own 4 bits, groups of 128, zero points."""
    count, scales = -(-ROTATE // (K * N // 2)), torch.rand(K // GROUP, N, 2).bfloat16()
    ops: Any = torch.ops.aten
    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    first = ops._convert_weight_to_int4pack_for_cpu(codes, 1)
    packed = [loaded(first) for _ in range(count)]
    call = ops._weight_int4pack_mm_for_cpu
    return [lambda x, weight=weight: call(x, weight, GROUP, scales) for weight in packed]  # type: ignore[misc]


def int8pack() -> Calls:
    """torch's own 8 bits, a scale for each output."""
    made = [loaded(torch.randint(-128, 128, (N, K), dtype=torch.int8)) for _ in range(-(-ROTATE // (K * N)))]
    scales, call = torch.rand(N).bfloat16(), torch.ops.aten._weight_int8pack_mm
    return [lambda x, weight=weight: call(x, weight, scales) for weight in made]  # type: ignore[misc]


def int_mm() -> Calls:
    """torch's own sums of int8, of inputs that were quantized before."""

    def call(codes: Tensor, x: Tensor) -> Tensor:
        return torch._int_mm(x.to(torch.int8), codes.T)

    made = (loaded(torch.randint(-128, 128, (N, K), dtype=torch.int8)) for _ in range(-(-ROTATE // (K * N))))
    return [partial(call, codes) for codes in made]


def reading(size: int) -> Calls:
    """By which torch reads so many bytes, of 1 GiB."""

    def call(part: Tensor, x: Tensor) -> Tensor:
        return part.max()

    pool = in_large_pages(torch.empty(ROTATE // 4, dtype=torch.int32)).zero_()
    parts = pool[: len(pool) // (size // 4) * (size // 4)].split(size // 4)
    return [partial(call, part) for part in parts]


def peer(name: str) -> Calls:
    """Another program's."""
    bits, make = PEERS[name]
    return make(K, N, -(-ROTATE // (K * N * bits // 8)))


def in_turns(ways: dict[str, Calls], x: Tensor, rounds: int, clock: Clock) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, calls in ways.items():
            start = clock()
            calls[turn % len(calls)](x)
            took[name].append(clock() - start)
    return {name: times[1:] for name, times in took.items()}


WAYS: dict[str, tuple[int, Callable[[], Calls]]] = {
    "panels, 4 bits": (K * N // 2, lambda: panels(gptq(4), 4)),
    "panels, 8 bits": (K * N, lambda: panels(gptq(8), 8)),
    "panels, MLX of 4 bits": (K * N // 2, lambda: panels(mlx(), 4)),
    "panels, Q4_K": (K * N // 2, lambda: panels(gguf("Q4_K"), 4)),
    "panels, Q6_K": (K * N, lambda: panels(gguf("Q6_K"), 8)),
    "MLX, dequantized": (K * N // 2, lambda: dequantized(mlx())),
    "Q4_K, dequantized": (K * N // 2, lambda: dequantized(gguf("Q4_K"))),
    "FP8": (K * N, fp8),
    "MXFP4": (K * N // 2, mxfp4),
    "NVFP4": (K * N // 2, nvfp4),
    "nf4": (K * N // 2, nf4),
    "int8": (K * N, int8),
    "int8, inputs too": (K * N, int8_inputs),
    "torch int4pack": (K * N // 2, int4pack),
    "torch int8pack": (K * N, int8pack),
    "torch int_mm": (K * N, int_mm),
    "torch bfloat16": (K * N * 2, lambda: plain(torch.bfloat16)),
    "torch float32": (K * N * 4, lambda: plain(torch.float32)),
}
OTHERS = {name: (K * N * bits // 8, partial(peer, name)) for name, (bits, _) in PEERS.items()}
LIKE_OTHERS = "panels, 4 bits", "panels, 8 bits", "nf4", "int8", "torch int4pack", "torch bfloat16"
ALL = WAYS | OTHERS


def made(names: Iterable[str]) -> dict[str, Calls]:
    """The ways of these names, but those of programs that are not here."""
    ways = {}
    for name in names:
        try:
            ways[name] = ALL[name][1]()
        except ImportError as missing:
            Console(stderr=True).print(f"left out: {name}: {missing}", markup=False)
    return ways


def rows(tokens: list[int], ways: dict[str, Calls], rounds: int, clock: Clock) -> Iterator[list[str]]:
    for call in (call for calls in ways.values() for call in calls):
        call(torch.randn(1, K).bfloat16())  # what is found out once for a layer counts for nothing
    sizes = {ALL[name][0] for name in ways}
    readers = {str(size): reading(size) for size in sizes}
    for M in tokens:
        x = torch.randn(M, K).bfloat16()
        found = in_turns(ways | readers, x, max(3, rounds if M <= 16 else rounds // 5), clock)
        for name in ways:
            read, took = ALL[name][0], found[name]
            share = f"{min(found[str(read)]) / min(took):.0%}"
            best = [f"{1e3 * min(took):.2f}", f"{1e3 * median(took):.2f}", f"{read / min(took) / 1e9:.1f}"]
            yield [str(M), name, *best, share]


def main() -> None:
    """Print the table, of the tokens and ways that are asked for."""
    parser = parser_of(__doc__, ALL, [1, 2, 4, 6, 7, 16, 64, 256], 30)
    parser.add_argument("--peers", action="store_true", help="other programs, and ways that are like theirs")
    asked = parser.parse_args()
    names = asked.only or ((*LIKE_OTHERS, *OTHERS) if asked.peers else WAYS)
    clock = clock_of(asked)
    title = f"{K} x {N}, {native.isa()}, {native.threads()} threads"
    table = Table("M", "how", "ms, best", "ms, median", "GB/s", "of reading", title=title)
    with torch.no_grad():
        for row in rows(asked.tokens, made(names), asked.rounds, clock):
            table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
