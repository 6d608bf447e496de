"""Faults of MXFP4 and MXFP8: exponents, nibbles, tiles of scales, and DeepSeek V4's tensors."""

from tests.faults.fault import Fault

_MX, _FP4, _FP8 = "qload/formats/mx.py", "qload/layouts/fp4.py", "qload/formats/fp8.py"
_SWIZZLE, _STACKS = "qload/layouts/swizzle.py", "qload/experts/stack_finder.py"
_FLOAT4, _MXFP8, _METHOD = (
    "qload/conversion/float4.py",
    "qload/formats/mxfp8.py",
    "qload/detect/methods/mx.py",
)

FAULTS = (
    Fault(
        "e8m0-bias-128",
        _FP4,
        "exponents.to(torch.int32) << MANTISSA",
        "exponents.to(torch.int32) - 1 << MANTISSA",
    ),
    Fault("mxfp8-groups-of-16", _MXFP8, "device=device) // GROUP", "device=device) // 16 % 2"),
    Fault(
        "mxfp8-scales-divide",
        _MXFP8,
        "lookup=byte_values(self.weight.dtype, device),",
        "lookup=byte_values(self.weight.dtype, device), divide=True,",
    ),
    Fault(
        "mxfp8-exponents-as-numbers",
        _MXFP8,
        "scales=fp4.e8m0(self.exponents)",
        "scales=self.exponents.float()",
    ),
    Fault("mxfp8-other-name-unknown", _MXFP8, '("weight_scale", "weight_scale_inv")', '("weight_scale",)'),
    Fault(
        "mxfp8-ignored-layers-quantized",
        _METHOD,
        'lists = ("modules_to_not_convert", "ignored_layers")',
        'lists = ("modules_to_not_convert",)',
    ),
    Fault("mxfp8-blocks-of-any-size", _METHOD, "if block not in (None, MX_BLOCK):", "if block == []:"),
    Fault("mxfp4-high-nibble-first", _MX, "packed, high_first=False", "packed, high_first=True"),
    Fault(
        "mxfp4-experts-interleaved",
        _MX,
        "self.blocks.flatten(2).flatten(0, 1), self.scales.flatten(0, 1)",
        "self.blocks.flatten(2).swapaxes(0, 1).flatten(0, 1), self.scales.flatten(0, 1)",
    ),
    Fault(
        "swizzle-rows-in-turn",
        _SWIZZLE,
        "ROWS, OUTPUTS // ROWS, GROUPS)\n    return tiles.swapaxes(1, 3)",
        "OUTPUTS // ROWS, ROWS, GROUPS).swapaxes(2, 3)\n    return tiles.swapaxes(1, 3)",
    ),
    Fault("deepseek-scales-unknown", _FP8, 'stored_scale="scale"', 'stored_scale="scales"'),
    Fault("deepseek-codes-unknown", _MX, '"weight_scale_inv", "scale")', '"weight_scale_inv")'),
    Fault(
        "deepseek-signed-bytes-refused",
        _MX,
        "(dtypes.uint8, dtypes.int8), (dtypes",
        "(dtypes.uint8,), (dtypes",
    ),
    Fault("deepseek-signed-bytes-as-int8", _STACKS, "dtypes.uint8 or pairs", "dtypes.uint8"),
    Fault("deepseek-any-int8-as-pairs", _STACKS, "scale.stored_dtype in E8M0_DTYPES and", "True and"),
    Fault(
        "deepseek-written-unsigned",
        _FLOAT4,
        "dtypes.int8, dtypes.float8_e8m0fnu",
        "dtypes.uint8, dtypes.float8_e8m0fnu",
    ),
    Fault(
        "fp8-exponents-as-integers",
        _FP8,
        "scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale",
        "scale",
    ),
)
