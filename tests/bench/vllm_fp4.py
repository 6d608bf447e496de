"""vLLM's FP4 Marlin on weights that qload repacked: `python -m tests.bench.vllm_fp4 DIR`.

DIR holds the library of operators of vLLM 0.33 (`_C_stable_libtorch`). Each product has to be within the
bound of qload.testing in the order of vLLM 0.33, and outside of it in that of vLLM 0.11; the words have to be
those of vLLM's own repack. Prints a line for each, in units of the bound, and ends with 1 where one is wrong.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from qload.formats import CTMXFP4Weight, ModelOptNVFP4Weight, MXFP4Config, NVFP4Config
from qload.kernel_formats import Fp4MarlinWeight, repack
from qload.kernels.bounds import excess
from qload.kernels.scalar_type import scalar_types
from qload.spec import Weight
from qload.testing.checks import assert_same_bits, derived_bound
from tests.bench import peer_folder

SHAPES = ((64, 128), (72, 96), (256, 1088), (4096, 4096), (2048, 8192))  # (N, K)
TOKENS = (1, 3, 16, 17, 64, 200)
CASES = (("nvfp4", torch.float16), ("nvfp4", torch.bfloat16), ("mxfp4", torch.bfloat16))


def layer(kind: str, N: int, K: int) -> Weight:
    """Random codes and scales on the GPU; scales of NVFP4 have a largest one of 3, which is raised."""
    noise = torch.Generator("cuda").manual_seed(N + K)
    packed = torch.randint(256, (N, K // 2), generator=noise, device="cuda", dtype=torch.uint8)
    if kind == "mxfp4":
        exponents = torch.randint(112, 128, (N, K // 32), generator=noise, device="cuda", dtype=torch.uint8)
        return CTMXFP4Weight(config=MXFP4Config(), weight_packed=packed, weight_scale=exponents)
    scales = torch.rand(N, K // 16, generator=noise, device="cuda") * 3 + 0.05
    return ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=packed,
        weight_scale=scales.to(torch.float8_e4m3fn),
        weight_scale_2=torch.full((1,), 0.0123, device="cuda"),
    )


def operator(packed: Fp4MarlinWeight) -> Callable[[Tensor], Tensor]:
    """x (M, K) -> y (M, N) by vLLM's operator, on any order: it is told no order."""
    N, K = packed.shape
    Kp, Np = 16 * packed.qweight.shape[0], packed.qweight.shape[1] // 2
    factor = None if packed.global_scale is None else packed.global_scale.float()
    locks = torch.zeros(4 * torch.cuda.get_device_properties().multi_processor_count, dtype=torch.int32)
    locks = locks.cuda()

    def call(x: Tensor) -> Tensor:
        given = pad(x, (0, Kp - K)).contiguous()
        y: Tensor = torch.ops._C.marlin_gemm(
            given, None, packed.qweight, None, packed.scales, None, factor, None, locks,
            scalar_types.float4_e2m1f.id, x.shape[0], Np, Kp, False, True, False,
        )  # fmt: skip
        return y[:, :N]

    return call


def repacked_words(weight: Weight, packed: Fp4MarlinWeight) -> Tensor:
    """The words that vLLM's operator makes of the same padded codes."""
    Kp, Np = 16 * packed.qweight.shape[0], packed.qweight.shape[1] // 2
    held = weight.fields()
    bytes_ = held["weight_packed"] if "weight_packed" in held else held["weight"]
    words = bytes_.contiguous().view(torch.int32).T
    wide = pad(words, (0, Np - words.shape[1], 0, Kp // 8 - words.shape[0])).contiguous()
    made: Tensor = torch.ops._C.gptq_marlin_repack(wide, Kp, Np, 4, False)
    return made


def rows() -> Iterator[tuple[str, bool]]:
    """A line for each product, and whether it is as it should be."""
    for kind, dtype in CASES:
        for N, K in SHAPES:
            weight = layer(kind, N, K)
            new = repack(weight, "marlin_vllm_0_33", dtype=dtype)
            old = repack(weight, "marlin_vllm_0_11", dtype=dtype)
            assert isinstance(new, Fp4MarlinWeight)
            assert isinstance(old, Fp4MarlinWeight)
            assert_same_bits(new.qweight, repacked_words(weight, new))
            for M in TOKENS:
                chance = torch.Generator("cuda").manual_seed(M)
                x = torch.randn(M, K, generator=chance, device="cuda").to(dtype)
                right, wrong = (off(each, x, weight) for each in (new, old))
                name = f"{kind} {str(dtype).removeprefix('torch.')} N={N} K={K} M={M}"
                yield f"{name}: {right:.3f} of the bound; vLLM 0.11's order {wrong:.3g}", right <= 1 < wrong


def off(packed: Fp4MarlinWeight, x: Tensor, weight: Weight) -> float:
    """The largest error of vLLM's product, in units of the bound of x times a weight."""
    return float(excess(operator(packed)(x), derived_bound(x, weight)).nan_to_num(9e9).max())


def main() -> int:
    """Run all cases; 0: each is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    names = peer_folder.add(parser.parse_args().folder)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {', '.join(names)}\n")
    failed = 0
    for line, right in rows():
        failed += not right
        sys.stdout.write(f"{line}{'' if right else '  WRONG'}\n")
    sys.stdout.write(f"{failed} wrong\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
