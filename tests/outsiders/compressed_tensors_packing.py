"""compressed-tensors' packing of integers into words, put on trial through the public suite."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance import ConformanceCase, LinearKernelSuite, PackerSuite
from qload.conformance.linear_checks import LinearChecks
from qload.testing.checks import Misread

quantization = pytest.importorskip("compressed_tensors.quantization")
base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")


class TestPackToInt32(PackerSuite):
    """Codes are signed there, and offset by half their range in words."""

    format = "ct_pack"
    subject = "pack_to_int32, unpack_from_int32"
    package = "compressed-tensors"

    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        half = 2 ** (case.bits - 1)
        packed = {"weight_packed": helpers.pack_to_int32((codes.codes - half).to(torch.int8), case.bits)}
        if not case.symmetric:
            zeros = (codes.zeros - half).to(torch.int8)
            packed["weight_zero_point"] = helpers.pack_to_int32(zeros, case.bits, packed_dim=0)
        return packed

    def unpack(self, tensors: Any, case: ConformanceCase) -> Tensor:
        shape = torch.Size((case.N, case.K))
        codes: Tensor = helpers.unpack_from_int32(tensors["weight_packed"], case.bits, shape)
        return codes.to(torch.int32) + 2 ** (case.bits - 1)


class TestDecompress(LinearKernelSuite):
    """What its compressor reads from the tensors of a layer, as a kernel that multiplies by it."""

    format = "ct_pack"
    subject = "PackedQuantizationCompressor.decompress"
    package = "compressed-tensors"

    def pack(self, weight: Any) -> Any:
        config, stored = weight.config, {**weight.fields(), "weight_shape": torch.tensor(weight.shape)}
        grouped = config.group_size != -1
        args = quantization.QuantizationArgs(
            num_bits=config.bits,
            symmetric=config.symmetric,
            strategy="group" if grouped else "channel",
            group_size=config.group_size if grouped else None,
        )
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
        return base.PackedQuantizationCompressor.decompress(stored, scheme)["weight"]

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return (x.float() @ buffers.to(x.dtype).float().T).to(x.dtype)

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        return not case.act_order, "compressed-tensors has no groups that lie anywhere any more"


def test_act_order_is_refused_where_a_config_says_it_and_lost_where_none_does() -> None:
    with pytest.raises(ValueError, match="actorder='group' has been removed"):
        quantization.QuantizationArgs(num_bits=4, strategy="group", group_size=128, actorder="group")
    (case,) = [case for case in TestDecompress.cases("smoke") if case.act_order]
    unasked = type("Unasked", (TestDecompress,), {"can_implement": lambda self, case: (True, "")})

    with pytest.raises(Misread) as caught:
        LinearChecks(unasked(), case, "cpu").reads_back()

    assert caught.value.diagnosis.fault == "act-order-ignored"
