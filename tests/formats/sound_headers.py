"""A sound layer of each format as its headers show it, and what is to be changed in it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qload import formats
from qload.spec import Config, Weight

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sound:
    """A layer as its headers show it, its facts, and the changes to config and facts that are told."""

    kind: type[Weight]
    config: Config
    shapes: Shapes
    facts: dict[str, Tensor] = field(default_factory=dict)
    claims: tuple[dict[str, Any], ...] = ()
    other_facts: tuple[dict[str, Any], ...] = ()
    other_shapes: tuple[Shapes, ...] = ()


ROWS, ACT_ORDER = torch.arange(64, dtype=torch.int32) // 32, torch.arange(64, dtype=torch.int32) % 2
GPTQ_SHAPES = {"qweight": (8, 16), "qzeros": (2, 2), "scales": (2, 16), "g_idx": (64,)}
SOUND = {
    "gptq": Sound(
        formats.GPTQWeight,
        formats.GPTQConfig(4, 32),
        GPTQ_SHAPES,
        {"g_idx": ROWS},
        (
            *({"bits": bits} for bits in (2, 3, 8)),
            *({"group_size": size} for size in (-1, 31, 33, 63, 64, 16)),
            *({"desc_act": said} for said in (True, False)),
            {"indexed": True},
            {"indexed": False},
        ),
        ({"g_idx": ACT_ORDER}, {"g_idx": 0 * ROWS}, {"g_idx": ROWS + 1}, {"g_idx": ROWS - 1}),
        (
            {**GPTQ_SHAPES, "qzeros": (2, 4), "qweight": (16, 16)},
            {**GPTQ_SHAPES, "qzeros": (0, 2), "scales": (0, 16)},
            {name: GPTQ_SHAPES[name] for name in ("qweight", "qzeros", "scales")},
        ),
    ),
    "awq": Sound(
        formats.AWQWeight,
        formats.AWQConfig(32),
        {"qweight": (64, 2), "qzeros": (2, 2), "scales": (2, 16)},
        {},
        ({"bits": 8}, {"group_size": -1}, {"group_size": 64}, {"group_size": 16}, {"zero_point": False}),
        (),
        ({"qweight": (64, 4), "qzeros": (2, 4), "scales": (2, 16)}, {"qweight": (64, 2), "scales": (2, 16)}),
    ),
    "marlin": Sound(
        formats.MarlinWeight,
        formats.MarlinConfig(128),
        {"B": (16, 512), "s": (2, 256)},
        {},
        ({"group_size": -1}, {"group_size": 256}, {"group_size": 255}, {"bits": 8}),
    ),
    "marlin 24": Sound(
        formats.Marlin24Weight,
        formats.Marlin24Config(128),
        {"B_24": (8, 512), "B_meta": (16, 64), "s": (2, 256)},
        {},
        (
            *({"group_size": size} for size in (-1, 64, 127, 128, 129, 256)),
            *({"group_size": size, "compressed": True} for size in (-1, 64, 127, 128, 129, 255, 256)),
        ),
    ),
    "eetq": Sound(
        formats.EETQWeight,
        formats.EETQConfig(),
        {"weight": (64, 64), "weight_scales": (64,)},
        {},
        (),
        (),
        ({"weight": (64, 32), "weight_scales": (64,)}, {"weight": (64, 0), "weight_scales": (0,)}),
    ),
    "fp8": Sound(
        formats.Fp8Weight,
        formats.Fp8Config(),
        {"weight": (32, 16), "weight_scale": (32, 1), "input_scale": (1,)},
        {},
        (
            *({"per": per} for per in ("tensor", "parts", "channel")),
            *({"per": "block", "block": size} for size in ((1, 16), (32, 16), (16, 8), (1, 15))),
            {"dtype": torch.float8_e5m2},
            {"input_scale": False},
            {"divide": True},
        ),
        (),
        tuple(
            {"weight": (32, 16), "weight_scale": shape, **more}
            for shape in ((1,), (1, 1), (2,), (32,), (1, 32), (2, 2), (2, 1, 2, 1), (32, 16))
            for more in ({}, {"input_scale": (2,)})
        ),
    ),
    "fp8 of blocks": Sound(
        formats.Fp8Weight,
        formats.Fp8Config("block", (16, 8)),
        {"weight": (32, 16), "weight_scale": (2, 2)},
        {},
        ({"axes": "P"}, {"block": (32, 16)}, {"block": (31, 15)}, {"block": (33, 17)}),
        (),
        ({"weight": (32, 16), "weight_scale": (2, 1, 2, 1)}, {"weight": (32, 16), "weight_scale": (1,)}),
    ),
    "a block as large as the layer": Sound(
        formats.Fp8Weight,
        formats.Fp8Config("block", (128, 128), axes="P"),
        {"weight": (32, 16), "weight_scale": (1,)},
        {},
        ({"block": (16, 128)}, {"block": (128, 8)}, {"axes": ""}),
    ),
    "int8": Sound(
        formats.CTIntWeight,
        formats.CTIntConfig((1, 8)),
        {"weight": (8, 32), "weight_scale": (8, 4)},
        {},
        (
            *({"block": size} for size in (None, (1, -1), (1, 31), (1, 32), (1, 33), (2, 8), (1, 16))),
            {"bits": 4},
            {"symmetric": False},
            {"static": True},
        ),
        (),
        (
            {"weight": (8, 32), "weight_scale": (8, 4), "weight_zero_point": (8, 4)},
            {"weight": (8, 32), "weight_scale": (8, 4), "input_scale": (2,)},
        ),
    ),
    "pack-quantized": Sound(
        formats.CTPackWeight,
        formats.CTPackConfig(4, 32),
        {"weight_packed": (16, 8), "weight_scale": (16, 2), "weight_shape": (2,)},
        {"weight_shape": torch.tensor([16, 64])},
        (
            *({"bits": bits} for bits in (2, 3, 5, 8)),
            *({"group_size": size} for size in (-1, 16, 31, 33, 63, 64)),
            {"act_order": True},
            {"symmetric": False},
            {"dense": True},
            {"dense": False},
        ),
        tuple(
            {"weight_shape": torch.tensor(shape)}
            for shape in ([16, 63], [16, 57], [16, 56], [16, 65], [15, 64], [16, 0], [16, 1], [16, -1])
        ),
        (
            {"weight_packed": (16, 8), "weight_scale": (16, 1), "weight_shape": (2,)},
            {"weight_packed": (16, 8), "weight_scale": (16, 2)},
            {"weight_packed": (16, 8), "weight_scale": (16, 2), "weight_zero_point": (2, 2)},
            {"weight_packed": (16, 8), "weight_scale": (16, 2), "weight_zero_point": (3, 2)},
        ),
    ),
    "pack-quantized with an index": Sound(
        formats.CTPackWeight,
        formats.CTPackConfig(4, 32, act_order=True),
        {"weight_packed": (16, 8), "weight_scale": (16, 2), "weight_g_idx": (64,), "weight_shape": (2,)},
        {"weight_shape": torch.tensor([16, 64]), "weight_g_idx": ROWS},
        ({"group_size": 64}, {"group_size": -1}),
        ({"weight_g_idx": ACT_ORDER}, {"weight_g_idx": 0 * ROWS}, {"weight_g_idx": ROWS + 1}),
        (
            {
                "weight_packed": (16, 8), "weight_scale": (16, 1), "weight_g_idx": (64,), "weight_shape": (2,)
            },
        ),
    ),
    "pack-quantized, one scale": Sound(
        formats.CTPackTensorWeight,
        formats.CTPackTensorConfig(4),
        {"weight_packed": (16, 8), "weight_scale": (1,), "weight_shape": (2,)},
        {"weight_shape": torch.tensor([16, 64])},
        ({"bits": 3}, {"bits": 8}, {"dense": True}, {"dense": False}, {"symmetric": False}),
        tuple(
            {"weight_shape": torch.tensor(shape)}
            for shape in ([16, 63], [16, 56], [16, 65], [15, 64], [17, 64], [16, 0], [16, 1])
        ),
        ({"weight_packed": (16, 8), "weight_scale": (1,)},),
    ),
    "nvfp4": Sound(
        formats.ModelOptNVFP4Weight,
        formats.NVFP4Config(),
        {"weight": (8, 16), "weight_scale": (8, 2), "weight_scale_2": (1,), "input_scale": (1,)},
    ),
    "mxfp8": Sound(
        formats.MXFP8Weight, formats.MXFP8Config(), {"weight": (8, 64), "weight_scale": (8, 2)}
    ),
    "modelopt awq": Sound(
        formats.ModelOptAWQWeight,
        formats.ModelOptAWQConfig(),
        {"weight": (4, 64), "weight_scale": (8, 4), "pre_quant_scale": (64,)},
        {},
        ({"group_size": 16}, {"group_size": 32}, {"group_size": 64}, {"scaled_inputs": False}),
        (),
        ({"weight": (4, 64), "weight_scale": (8, 1)}, {"weight": (4, 64), "weight_scale": (8, 0)}),
    ),
    "modelopt int8": Sound(
        formats.ModelOptInt8Weight,
        formats.ModelOptInt8Config(),
        {"weight": (8, 64), "weight_scale": (8,), "pre_quant_scale": (64,), "input_scale": (1,)},
        {},
        ({"scaled_inputs": False},),
    ),
    "modelopt nvfp4 extended": Sound(
        formats.ModelOptNVFP4ExtendedWeight,
        formats.ModelOptNVFP4ExtendedConfig(low_rank=True),
        {
            "weight": (8, 32), "weight_scale": (8, 4), "weight_scale_2": (1,), "pre_quant_scale": (64,),
            "lora_a": (2, 64), "lora_b": (8, 2),
        },
    ),
    "exl2": Sound(
        formats.Exl2Weight,
        formats.Exl2Config(),
        {
            "q_weight": (12, 32), "q_scale": (2, 4), "q_scale_max": (2,), "q_groups": (4,), "q_invperm": (64,)
        },
        {
            "q_groups": torch.tensor([8, 0, 4, 8], dtype=torch.int16),
            "q_invperm": torch.arange(64, dtype=torch.int32),
        },
        (),
        (
            *(
                {"q_groups": torch.tensor(groups, dtype=torch.int16)}
                for groups in (
                    [4, 0, 8, 4], [7, 0, 4, 8], [8, 1, 4, 8], [8, 0, 4, 0], [8, 0, 4, 12], [8, 0, 4, 7]
                )
            ),
            {"q_invperm": torch.arange(64, dtype=torch.int32).flip(0)},
            {"q_invperm": torch.zeros(64, dtype=torch.int32)},
        ),
    ),
    "plain": Sound(
        formats.UnquantizedWeight,
        formats.UnquantizedConfig(),
        {"weight": (8, 16)},
        {},
        ({"unused": ("weight_scale",)},),
        (),
        ({"weight": (8,)}, {"weight": ()}, {"weight": (8, 0)}),
    ),
}  # fmt: skip
