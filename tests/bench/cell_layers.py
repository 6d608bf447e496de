"""A large layer of every format, of random words made on the device, for `tests/bench/cells.py`."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qload.formats import (
    AWQConfig,
    AWQWeight,
    BNB4Config,
    BNBConfig,
    BNBNF4Weight,
    BNBWeight,
    CTIntConfig,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    EETQConfig,
    EETQWeight,
    Exl2Config,
    Exl2Weight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
    MXFP4Config,
    MXFP8Config,
    MXFP8Weight,
    NVFP4Config,
    UnquantizedWeight,
)
from qload.kernel_formats import repack
from qload.layouts import Stored, gptq, marlin_24
from qload.spec import ActivationScheme, Layer, Weight

Made = Callable[[int, int], Weight]


class Device:
    """Random tensors of a device."""

    name = "cuda"

    def words(self, *shape: int) -> Tensor:
        """int32 of any bits."""
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=self.name)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        """uint8."""
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.name)

    def scales(self, *shape: int) -> Tensor:
        """float32 between 0.001 and 0.02."""
        return torch.rand(*shape, device=self.name) * 0.019 + 0.001


RANDOM = Device()


def plain(dtype: torch.dtype) -> Made:
    """A weight that is not quantized."""
    return lambda N, K: UnquantizedWeight(weight=(torch.randn(N, K, device=RANDOM.name) / 64).to(dtype))


def with_gptq(bits: int, act_order: bool = False) -> Made:
    """GPTQ in groups of 128."""

    def make(N: int, K: int) -> Weight:
        groups = K // 128
        g_idx = torch.arange(K, device=RANDOM.name, dtype=torch.int32) // 128
        if act_order:
            g_idx = g_idx[torch.randperm(K, device=RANDOM.name)]
        return GPTQWeight(
            config=GPTQConfig(bits, 128, zeros=Stored()),
            qweight=RANDOM.words(K * bits // 32, N),
            qzeros=Stored().write(
                torch.full((groups, N), 2 ** (bits - 1), device=RANDOM.name), gptq.columns(bits)
            ),
            scales=RANDOM.scales(groups, N).half(),
            g_idx=g_idx,
        )

    return make


def awq(N: int, K: int) -> Weight:
    """AWQ in groups of 128."""
    return AWQWeight(
        config=AWQConfig(128),
        qweight=RANDOM.words(K, N // 8),
        qzeros=RANDOM.words(K // 128, N // 8),
        scales=RANDOM.scales(K // 128, N).half(),
    )


def marlin(N: int, K: int) -> Weight:
    """A Marlin checkpoint."""
    return MarlinWeight(
        config=MarlinConfig(128), B=RANDOM.words(K // 16, 2 * N), s=RANDOM.scales(K // 128, N).half()
    )


def sparse(N: int, K: int) -> Weight:
    """2:4 in Marlin's order."""
    pairs = torch.tensor(marlin_24.PAIRS, device=RANDOM.name)
    fields = pairs[torch.randint(len(pairs), (K // 32, 2 * N, 4), device=RANDOM.name)]
    meta = (fields << torch.arange(0, 16, 4, device=RANDOM.name)).sum(-1)
    return Marlin24Weight(
        config=Marlin24Config(128, 4, compressed=False),
        B_24=RANDOM.words(K // 32, 2 * N),
        B_meta=torch.where(meta >= 1 << 15, meta - (1 << 16), meta).to(torch.int16),
        s=RANDOM.scales(K // 128, N).half(),
    )


def exl2(N: int, K: int) -> Weight:
    """Half of the groups of 5 bits, half of 4."""
    bits = torch.cat([torch.full((K // 64,), 5), torch.full((K // 64,), 4)])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), bits.cumsum(0)])
    groups = torch.stack([bits, starts[:-1]], 1).flatten().to(torch.int16)
    return Exl2Weight(
        config=Exl2Config(),
        q_weight=RANDOM.words(int(starts[-1]), N),
        q_groups=groups.to(RANDOM.name),
        q_invperm=torch.randperm(K).to(RANDOM.name, torch.int32),
        q_scale=RANDOM.words(len(bits), N // 8),
        q_scale_max=(RANDOM.scales(len(bits)) * 64).half(),
    )


def eetq(N: int, K: int) -> Weight:
    """EETQ."""
    return EETQWeight(
        config=EETQConfig(), weight=RANDOM.bytes(K, N).view(torch.int8), weight_scales=RANDOM.scales(N).half()
    )


def fp8(*scales: int, block: tuple[int, int] | None = None) -> Made:
    """FP8; `scales`: how many outputs and inputs share one, 0 for all."""

    def make(N: int, K: int) -> Weight:
        shape = tuple(-(-size // each) if each else 1 for size, each in zip((N, K), scales, strict=True))
        config = Fp8Config("block", block) if block else Fp8Config("channel" if scales[0] else "tensor")
        codes = RANDOM.bytes(N, K, high=0x40) | (RANDOM.bytes(N, K) & 0x80)
        scale = RANDOM.scales(*shape)
        return Fp8Weight(
            config=config,
            weight=codes.view(torch.float8_e4m3fn),
            weight_scale=scale if scales[0] else scale.reshape(1),
        )

    return make


def nf4(N: int, K: int) -> Weight:
    """bitsandbytes' nf4 in blocks of 64."""
    return BNBNF4Weight(
        config=BNB4Config("nf4", 64, K=K),
        weight=RANDOM.bytes(N * K // 2, 1),
        absmax=RANDOM.scales(N * K // 64),
        quant_map=torch.linspace(-1, 1, 16, device=RANDOM.name),
    )


def int8(N: int, K: int) -> Weight:
    """bitsandbytes' int8."""
    codes = RANDOM.bytes(N, K, high=255).to(torch.int16).sub(127).to(torch.int8)
    return BNBWeight(config=BNBConfig(), weight=codes, SCB=RANDOM.scales(N))


def ct_pack(bits: int) -> Made:
    """compressed-tensors' packed codes in groups of 128."""
    return lambda N, K: CTPackWeight(
        config=CTPackConfig(bits, 128, True, False),
        weight_packed=RANDOM.words(N, K * bits // 32),
        weight_scale=RANDOM.scales(N, K // 128).half(),
    )


def ct_pack_tensor(N: int, K: int) -> Weight:
    """The same with a scale for the tensor."""
    return CTPackTensorWeight(
        config=CTPackTensorConfig(4, True),
        weight_packed=RANDOM.words(N, K // 8),
        weight_scale=RANDOM.scales(1).half(),
    )


def ct_int(group: int) -> Made:
    """compressed-tensors' int8; group -1: one scale an output."""
    return lambda N, K: CTIntWeight(
        config=CTIntConfig((1, group)),
        weight=RANDOM.bytes(N, K).view(torch.int8),
        weight_scale=RANDOM.scales(N, 1 if group == -1 else K // group),
    )


def nvfp4(N: int, K: int) -> Weight:
    """compressed-tensors' NVFP4."""
    return CTNVFP4Weight(
        config=NVFP4Config(),
        weight_packed=RANDOM.bytes(N, K // 2),
        weight_scale=RANDOM.bytes(N, K // 16, low=0x20, high=0x50).view(torch.float8_e4m3fn),
        weight_global_scale=torch.full((1,), 64.0, device=RANDOM.name),
    )


def mxfp4(N: int, K: int) -> Weight:
    """MXFP4."""
    return CTMXFP4Weight(
        config=MXFP4Config(),
        weight_packed=RANDOM.bytes(N, K // 2),
        weight_scale=RANDOM.bytes(N, K // 32, low=116, high=122),
    )


def mxfp8(N: int, K: int) -> Weight:
    """MXFP8."""
    codes = RANDOM.bytes(N, K, high=0x40).view(torch.float8_e4m3fn)
    return MXFP8Weight(
        config=MXFP8Config(), weight=codes, weight_scale=RANDOM.bytes(N, K // 32, low=116, high=122)
    )


def modelopt_awq(N: int, K: int) -> Weight:
    """ModelOpt's AWQ, whose inputs have factors."""
    return ModelOptAWQWeight(
        config=ModelOptAWQConfig(128, True),
        weight=RANDOM.bytes(N // 2, K),
        weight_scale=RANDOM.scales(N, K // 128).half(),
        pre_quant_scale=torch.rand(K, device=RANDOM.name) + 0.5,
    )


def kept(layout: str, make: Made, **options: object) -> Made:
    """The same in the order of a kernel."""
    return lambda N, K: repack(make(N, K), layout, **options)


def declaring(make: Made, *scheme: object, **options: object) -> Made:
    """The same, whose inputs are quantized."""
    declared = ActivationScheme(*scheme, **options)  # type: ignore[arg-type]

    def made(N: int, K: int) -> Weight:
        weight = make(N, K)
        return replace(weight, layer=Layer((N,), K, (N, K), "up", None, declared))

    return made


LAYERS: dict[str, Made] = {
    "gptq 4": with_gptq(4),
    "gptq 4 act order": with_gptq(4, act_order=True),
    "gptq 2": with_gptq(2),
    "gptq 3": with_gptq(3),
    "gptq 8": with_gptq(8),
    "awq": awq,
    "marlin": marlin,
    "2:4": sparse,
    "exl2": exl2,
    "eetq": eetq,
    "fp8 tensor": fp8(0, 0),
    "fp8 channel": fp8(1, 0),
    "fp8 block": fp8(128, 128, block=(128, 128)),
    "nf4": nf4,
    "bnb int8": int8,
    "ct pack 4": ct_pack(4),
    "ct pack tensor": ct_pack_tensor,
    "ct int8 channel": ct_int(-1),
    "ct int8 group": ct_int(128),
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "modelopt awq": modelopt_awq,
    "in marlin's order": kept("marlin", with_gptq(4)),
    "in strips, act order": kept("strips", with_gptq(4, act_order=True)),
    "in exllama's order, act order": kept("exllama", with_gptq(4, act_order=True)),
    "fp8 in marlin's order": kept("marlin", fp8(1, 0), dtype=torch.bfloat16, exponent_bias=False),
    "nvfp4 in marlin's order": kept("marlin", nvfp4, dtype=torch.bfloat16),
    "w8a8 fp8 tensor": declaring(fp8(0, 0), "float", 8, True, "tensor"),
    "w8a8 fp8 token": declaring(fp8(1, 0), "float", 8, True, "token"),
    "w8a8 fp8 block": declaring(
        fp8(128, 128, block=(128, 128)), "float", 8, True, "group", 128, owner="transformers"
    ),
    "w8a8 int8 token": declaring(ct_int(-1), "int", 8, True, "token"),
    "w8a8 int8 asymmetric": declaring(ct_int(-1), "int", 8, True, "token", symmetric=False),
    "w4a8 int8": declaring(ct_pack(4), "int", 8, True, "token"),
    "w8a8 mxfp8": declaring(mxfp8, "float", 8, True, "group", 32, scale_type="e8m0"),
}
