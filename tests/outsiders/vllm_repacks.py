"""vLLM's repacks in Python: its packers, and its Marlin order as lanes read it, put on trial."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM's wheel is installed by `nox -s vllm` alone")
import tests.engines.vllm.stubs  # noqa: F401  what vLLM imports and nothing here calls
from qload.conformance import ConformanceCase, LinearKernelSuite, PackerSuite
from qload.testing import emulators

UTILS = "vllm.model_executor.layers.quantization.utils"
marlin = pytest.importorskip(f"{UTILS}.marlin_utils")
words = pytest.importorskip(f"{UTILS}.marlin_utils_test")
packers = pytest.importorskip(f"{UTILS}.quant_utils")


class TestGPTQPack(PackerSuite):
    """Words along K, and zero points, stored minus one, along N."""

    format = "gptq"
    subject = "gptq_pack, pack_cols, unpack_cols"
    package = "vllm"

    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        stored = (codes.zeros.int() - int(case.zeros != "v2")) % 2**case.bits
        return {
            "qweight": packers.gptq_pack(codes.codes.T.contiguous(), case.bits, case.K, case.N),
            "qzeros": packers.pack_cols(stored.T.contiguous(), case.bits, stored.shape[1], case.N),
        }

    def unpack(self, tensors: Any, case: ConformanceCase) -> Tensor:
        flat = tensors["qweight"].T.contiguous()  # of each output the words one after another
        return packers.unpack_cols(flat, case.bits, case.N, case.K)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if case.zeros == "wrapping":
            return False, "who packs zero points takes one from them, and says how zeros of 0 borrow"
        return 32 % case.bits == 0, "codes that fill words"


class TestAWQPack(PackerSuite):
    """Words along N, even codes first."""

    format = "awq"
    subject = "awq_pack"
    package = "vllm"

    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        packed = {"qweight": packers.awq_pack(codes.codes.T.contiguous(), case.bits, case.K, case.N)}
        if not case.symmetric:
            zeros = codes.zeros.int().T.contiguous()
            packed["qzeros"] = packers.awq_pack(zeros, case.bits, len(zeros), case.N)
        return packed

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.bits == 4, "the order of eight codes"


class TestGPTQToMarlin(LinearKernelSuite):
    """Symmetric codes, sorted by group, in Marlin's order; the emulated kernel sorts its inputs alike."""

    format = "gptq"
    subject = "marlin_weights, marlin_permute_scales"
    package = "vllm"

    def pack(self, weight: Any) -> Any:
        codes, K = weight.codes(), weight.shape[1]
        order = torch.arange(K) if codes.k_group is None else codes.k_group.argsort(stable=True)
        plain = codes.plain().T.int()[order].contiguous()
        return (*self.marlin(plain, codes.scales.T.contiguous(), codes.bits), None, order, codes.bits)

    def marlin(self, plain: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        (K, N), group = plain.shape, plain.shape[0] // scales.shape[0]
        return (
            words.marlin_weights(plain, K, N, bits, words.get_weight_perm(bits)),
            marlin.marlin_permute_scales(scales, K, N, group),
        )

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        qweight, scales, qzeros, order, bits = buffers
        w = emulators.marlin_weight(qweight, scales, bits=bits, qzeros=qzeros, perm=order)
        return emulators.multiply(x, w.to(x.dtype))

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        if case.bits not in (4, 8) or not case.symmetric:
            return False, "4 and 8 bits, symmetric"
        return not (case.act_order and case.split == "row"), "a part of K has groups that are no equal runs"


class TestAWQToMarlin(TestGPTQToMarlin):
    """AWQ's zero points go from its words to Marlin's."""

    format = "awq"
    subject = "awq_to_marlin_zero_points"
    package = "vllm"

    def pack(self, weight: Any) -> Any:
        codes = weight.codes()
        plain, scales = codes.plain().T.int().contiguous(), codes.scales.T.contiguous()
        zeros = weight.qzeros
        if zeros is not None:
            zeros = marlin.awq_to_marlin_zero_points(zeros, len(scales), plain.shape[1], codes.bits)
        return (*self.marlin(plain, scales, codes.bits), zeros, torch.arange(len(plain)), codes.bits)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return case.bits in (4, 8), "4 and 8 bits"
