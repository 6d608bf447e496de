"""Cases that every reader has to read alike, format by format."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.testing.vectors import contents
from qload.testing.vectors.case import Content

N, K, GROUP = 32, 128, 32
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def cases() -> Iterator[Content]:
    """All of them, with shares of those that are cut between groups."""
    yield from _gptq_cases()
    yield from _awq_cases()
    yield from _packed_cases()
    yield fp8()
    yield nvfp4()


def shared(case: Content) -> Iterator[Content]:
    """The case, and the same shared by two ranks along each axis."""
    yield case
    for axis in ("N", "K"):
        flags = (*case.flags, "shares")
        split: Any = axis
        yield replace(case, id=f"{case.id}.tp2{axis.lower()}", flags=flags, split=split, world=2)


def gptq(
    id: str,
    flags: tuple[str, ...],
    comment: str,
    *,
    bits: int = 4,
    group: int = GROUP,
    stored_minus: int = 1,
    act_order: bool = False,
    zeros: Tensor | None = None,
) -> Content:
    """Codes packed along K, zero points along N, stored minus `stored_minus`, within their bits."""
    size = K if group == -1 else group
    codes, scales = contents.codes(N, K, bits), contents.scales(N, K // size)
    zeros = contents.zeros(N, K // size, bits) if zeros is None else zeros
    index = contents.act_order(K, size) if act_order else torch.arange(K) // size
    stored = (zeros - stored_minus) % 2**bits
    return Content(
        id,
        "gptq",
        flags,
        comment,
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": act_order,
            "sym": bool((zeros == 2 ** (bits - 1)).all()),
            "checkpoint_format": "gptq" if stored_minus else "gptq_v2",
        },
        {
            "qweight": contents.packed(codes, bits).T,
            "qzeros": contents.packed(stored.T, bits),
            "scales": scales.T.half(),
            "g_idx": index.int(),
        },
        (N, K),
        contents.meaning(codes, zeros, scales, index),
    )


def _gptq_cases() -> Iterator[Content]:
    middle = torch.full((N, K // GROUP), 8)
    yield from shared(
        gptq("gptq.v1.w4.g32.sym", ("code-order", "scales"), "What most kernels take.", zeros=middle)
    )
    yield from shared(
        gptq("gptq.v1.w4.g32.zeros", ("zero-point-offset",), "Zero points differ; they are stored minus one.")
    )
    yield gptq(
        "gptq.v2.w4.g32.zeros", ("zero-point-offset",), "Zero points are stored as they are.", stored_minus=0
    )
    yield wrapped()
    yield gptq(
        "gptq.v1.w4.g32.actorder", ("act-order",), "The group of each input is in g_idx.", act_order=True
    )
    yield gptq("gptq.v1.w8.g32.zeros", ("code-width",), "Eight bits.", bits=8)
    yield gptq("gptq.v1.w2.g32.zeros", ("code-width",), "Two bits.", bits=2)
    yield gptq("gptq.v1.w4.channel", ("group-size",), "One group: group_size is -1.", group=-1)


def wrapped() -> Content:
    """Zero points of 0, stored as 15: the owner adds one to whole words, which carries over fields."""
    zeros = contents.zeros(N, K // GROUP, 4) - 1
    case = gptq("gptq.v1.w4.g32.wrapped", ("zero-point-wrap",), "", zeros=zeros)
    raised = (case.tensors["qzeros"].long() & 0xFFFFFFFF) + 0x11111111
    carried = (raised[..., None] >> 4 * torch.arange(8) & 15).flatten(1).T
    codes, scales = contents.codes(N, K, 4), contents.scales(N, K // GROUP)
    return replace(
        case,
        comment="Zero points of 0 are stored as 15. Adding one gives 0, or 16, or carries over fields.",
        expected=contents.meaning(codes, carried, scales, torch.arange(K) // GROUP),
        disputed=True,
    )


def _awq_cases() -> Iterator[Content]:
    codes, scales = contents.codes(N, K, 4), contents.scales(N, K // GROUP)
    zeros, groups = contents.zeros(N, K // GROUP, 4) - 1, torch.arange(K) // GROUP
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    yield from shared(
        Content(
            "awq.w4.g32.zeros",
            "awq",
            ("code-order", "zero-point-offset"),
            "Codes and zero points are packed along N, even ones first, zero points as they are.",
            config,
            {
                "qweight": contents.packed(codes.T, 4, AWQ),
                "qzeros": contents.packed(zeros.T, 4, AWQ),
                "scales": scales.T.half(),
            },
            (N, K),
            contents.meaning(codes, zeros, scales, groups),
        )
    )


def _packed_cases() -> Iterator[Content]:
    codes, scales = contents.codes(N, K, 4), contents.scales(N, K // GROUP)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    middle = torch.full((N, K // GROUP), 8)
    yield from shared(
        Content(
            "ct_pack.w4.g32.sym",
            "ct_pack",
            ("code-order", "code-sign"),
            "Codes are packed along K with 8 added; there are no zero points.",
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
            {
                "weight_packed": contents.packed(codes, 4),
                "weight_scale": scales.half(),
                "weight_shape": torch.tensor([N, K]),
            },
            (N, K),
            contents.meaning(codes, middle, scales, torch.arange(K) // GROUP),
        )
    )


def fp8() -> Content:
    """Bytes of e4m3 and a scale for each block of 16 outputs and 32 inputs."""
    values = (contents.codes(N, K, 4) - 8).float() / 4
    scales = contents.scales(N // 16, K // 32)
    wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
    return Content(
        "fp8.block16x32",
        "fp8",
        ("scale-blocks",),
        "Scales of blocks that are not square, so that transposed ones show.",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        {"weight": values.to(torch.float8_e4m3fn), "weight_scale_inv": scales},
        (N, K),
        values * wide,
    )


def nvfp4() -> Content:
    """Two e2m1 codes a byte, the first in the low bits; e4m3 scales of 16 inputs, and one of the tensor."""
    codes = contents.codes(N, K, 4)
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    scales, second = contents.scales(N, K // 16), 2.0**-3
    return Content(
        "nvfp4.modelopt",
        "nvfp4",
        ("nibble-order", "second-scale", "float-type"),
        "Every e2m1 code; the scale of the whole tensor multiplies.",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {
            "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
            "weight_scale": scales.to(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(second),
        },
        (N, K),
        table[codes] * scales.repeat_interleave(16, 1) * second,
    )
