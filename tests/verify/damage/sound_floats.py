"""Sound models in more formats: small floats, bytes, words of several widths and orders."""

from typing import Any

import torch
from torch import Tensor

from qload.layouts import compressed_tensors, eetq, gptq, marlin
from qload.layouts.exl2 import Exl2Groups
from tests.verify.damage.model import Model
from tests.verify.damage.sound import LEAST, MODELS, Make, modelled

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BIAS = 127  # of an exponent of eight bits


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors says of such layers."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def small(values: Tensor) -> Tensor:
    """The nearest codes E2M1, two in a byte, the first in the low bits."""
    codes = (values.abs()[..., None] - E2M1).abs().argmin(-1) | (values < 0).int() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def exponents(groups: Tensor, largest: float) -> Tensor:
    """The power of two of each group (N, G, size) by which its codes fit."""
    return (groups.abs().amax(2).clamp(min=LEAST) / largest).log2().ceil()


def nvfp4(make: Make = modelled) -> Model:
    """Groups of 16 with scales of FP8, and one scale that divides these."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, 16)
        outer = 6 * 448 / weight.abs().max().clamp(min=LEAST)
        scales = (groups.abs().amax(2).clamp(min=LEAST) / 6 * outer).to(torch.float8_e4m3fn)
        codes = small((groups / (scales.float() / outer)[..., None]).reshape_as(weight))
        return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": outer.reshape(1)}

    said = compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
    )
    return make(quantize, said)


def mxfp4(make: Make = modelled) -> Model:
    """Groups of 32 with a power of two."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, 32)
        powers = exponents(groups, 6)
        codes = small((groups / 2 ** powers[..., None]).reshape_as(weight))
        return {"weight_packed": codes, "weight_scale": (powers + BIAS).to(torch.uint8)}

    said = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    return make(quantize, said)


def mxfp8(make: Make = modelled) -> Model:
    """The same, of FP8."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, 32)
        powers = exponents(groups, 448)
        codes = (groups / 2 ** powers[..., None]).reshape_as(weight).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": (powers + BIAS).to(torch.uint8)}

    said = compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32)
    return make(quantize, said)


def int8(make: Make = modelled) -> Model:
    """Bytes with a scale an output."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127
        return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales.bfloat16()}

    return make(quantize, compressed("int-quantized", num_bits=8, type="int", strategy="channel"))


def eetq_bytes(make: Make = modelled) -> Model:
    """The same, in the order of EETQ's kernels."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(1).clamp(min=LEAST) / 127
        codes = (weight / scales[:, None]).round().int() + 128
        return {"weight": eetq.pack(codes), "weight_scales": scales.half()}

    return make(quantize, {"quant_method": "eetq", "weights": "int8"})


def asymmetric(make: Make = modelled) -> Model:
    """Words of four bits with zero points, as compressed-tensors writes them."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, 32)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low).clamp(min=LEAST) / 15
        zeros = (-low / scales).round()
        codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
        return {
            "weight_packed": compressed_tensors.pack(codes.reshape_as(weight).int(), 4, True),
            "weight_scale": scales.bfloat16(),
            "weight_zero_point": compressed_tensors.pack(zeros.int().T.contiguous(), 4, True).T.contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }

    said = compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    )
    return make(quantize, said)


def marlin_words(make: Make = modelled) -> Model:
    """Words of four bits in the order of Marlin's kernel."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups = weight.reshape(len(weight), -1, 128)
        scales = groups.abs().amax(2).clamp(min=LEAST) / 7.5
        codes = (groups / scales[..., None]).round().clamp(-8, 7).reshape_as(weight).int() + 8
        ordered = marlin.scales(scales.shape[1]).apply(scales.half().T.contiguous())
        return {"B": marlin.rows(4).pack(codes.T.contiguous()), "s": ordered}

    said = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
            "checkpoint_format": "marlin", "is_marlin_format": True}  # fmt: skip
    return make(quantize, said)


def exl2_words(make: Make = modelled) -> Model:
    """Inputs in an order of their own, a quarter of their groups in five bits and the others in four."""
    size, draw = 32, torch.Generator().manual_seed(1)

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        N, K = weight.shape
        count = K // size
        bits = torch.where(torch.arange(count) < -(-count // 4), 5, 4)
        order = torch.randperm(K, generator=draw)
        groups = weight.T[order].reshape(count, size, N)
        largest = groups.abs().amax(1).clamp(min=LEAST) / 2 ** (bits[:, None] - 1)
        unit = (largest.amax(1) / 256).clamp(min=2**-20).half()
        roots = (largest / unit[:, None].float()).sqrt().ceil().clamp(1, 16)
        scales = (roots.square() * unit[:, None].float())[:, None]
        codes = (groups / scales).round() + 2 ** (bits[:, None, None] - 1)
        codes = codes.clamp(min=0).minimum(2 ** bits[:, None, None] - 1).reshape(K, N).int()
        starts = torch.cat([torch.zeros(1), (bits * size // 32).cumsum(0)]).long()
        return {
            "q_weight": Exl2Groups(bits, starts).pack(codes),
            "q_scale": gptq.columns(4).pack(roots.int() - 1),
            "q_scale_max": (unit.float() * 256).half(),
            "q_groups": torch.stack([bits, starts[:-1]], 1).flatten().to(torch.int16),
            "q_invperm": order.argsort().int(),
        }

    return make(quantize, {"quant_method": "exl2", "bits": 4.25, "head_bits": 6})


MORE = {
    **MODELS, "nvfp4": nvfp4, "mxfp4": mxfp4, "mxfp8": mxfp8, "int8": int8, "eetq": eetq_bytes,
    "asymmetric": asymmetric, "marlin": marlin_words, "exl2": exl2_words,
}  # fmt: skip
