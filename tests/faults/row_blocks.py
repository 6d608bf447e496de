"""Faults of quanto, BitNet, AQLM and HQQ: blocks of rows, groups, shifts, and their settings."""

from tests.faults.fault import Fault

_BLOCKS, _SHARDING = "qload/layouts/row_blocks.py", "qload/loader/sharding.py"
_QUANTO, _QUANTO_METHOD = "qload/formats/quanto.py", "qload/detect/methods/quanto.py"
_BITNET, _AQLM = "qload/formats/bitnet.py", "qload/formats/aqlm.py"
_HQQ, _SETTINGS = "qload/formats/hqq/weight.py", "qload/formats/hqq/settings.py"

FAULTS = (
    Fault("row-blocks-low-first", _BLOCKS, "shifts[::-1] if self.high_first else shifts", "shifts"),
    Fault("row-blocks-of-the-whole", _SHARDING, "share.layer.sizes)[index]", "share.layer.sizes)"),
    Fault("quanto-shift-added", _QUANTO, "offsets=shifts.float()", "offsets=-shifts.float()"),
    Fault(
        "quanto-product-unrounded",
        _QUANTO,
        "dtype if is_float and dtype != torch.float32 else None",
        "None",
    ),
    Fault("quanto-sizes-unknown", _QUANTO_METHOD, "if stated else claims", "if False else claims"),
    Fault("quanto-scales-left-over", "qload/detect/loaders.py", "[2] in claims.settings)", "[2] in ())"),
    Fault(
        "quanto-zero-points-as-shifts",
        _QUANTO,
        "if is_float else shifts.int(),\n            offsets=shifts.float() if is_float else None,",
        ",\n            offsets=shifts.float(),",
    ),
    Fault("quanto-groups-of-one-row", _QUANTO, 'groups = "N C" if one_row', 'groups = "N 1" if one_row'),
    Fault(
        "quanto-float8-as-e4m3",
        _QUANTO_METHOD,
        "dtypes.BY_NAME.get(name[1:], dtypes.float8_e4m3fn)",
        "dtypes.float8_e4m3fn",
    ),
    Fault("bitnet-always-multiplies", _BITNET, "divide=self.config.divide,", "divide=False,"),
    Fault("bitnet-code-of-three", _BITNET, "weight & weight >> 1 & FIELDS != 0", "weight & 0 != 0"),
    Fault("bitnet-codes-from-0", _BITNET, "torch.ones_like(scales", "torch.zeros_like(scales"),
    Fault(
        "bitnet-divides-by-default",
        _BITNET,
        '"autobitlinear"] = "bitlinear"',
        '"autobitlinear"] = "autobitlinear"',
    ),
    Fault(
        "bitnet-first-block-high",
        _BITNET,
        "RowBlocks(BITS, BLOCKS)",
        "RowBlocks(BITS, BLOCKS, high_first=True)",
    ),
    Fault(
        "bitnet-scale-of-the-first",
        _BITNET,
        "expand_parts(self.weight_scale.float(),",
        "expand_parts(self.weight_scale.float().reshape(-1)[:1],",
    ),
    Fault(
        "bitnet-online-as-codes",
        _BITNET,
        'section.quantization_mode == "online":',
        'section.quantization_mode == "":',
    ),
    Fault("aqlm-first-codebook-alone", _AQLM, "self.codebooks[number].float()", "self.codebooks[0].float()"),
    Fault("aqlm-sums-in-float16", _AQLM, "sums = self.codebooks[0].float()[", "sums = self.codebooks[0]["),
    Fault("aqlm-scales-in-turn", _AQLM, ".repeat_interleave(config.out_group)", ".repeat(config.out_group)"),
    Fault("aqlm-exclusions-by-weight", _AQLM, "name.removesuffix(WEIGHT) for name", "name for name"),
    Fault("aqlm-signed-codes", _AQLM, "self.indices.long() & 2**config.bits - 1", "self.indices.long()"),
    Fault("aqlm-outputs-of-a-vector", _AQLM, "sums.swapaxes(1, 2)", "sums"),
    Fault("hqq-axis-0-in-order", _HQQ, "% (part // size))", "// size)"),
    Fault("hqq-difference-unrounded", _HQQ, "None if dtype == torch.float32 else dtype", "None"),
    Fault(
        "hqq-zero-after-the-scale",
        _HQQ,
        "zeros=zeros,\n            n_group",
        "zeros=None, offsets=zeros,\n            n_group",
    ),
    Fault(
        "hqq-axes-exchanged",
        _HQQ,
        "(0, size) if self.axis else (size, 0)",
        "(size, 0) if self.axis else (0, size)",
    ),
    Fault(
        "hqq-crossing-groups-in-turn",
        _HQQ,
        "Tensor.repeat_interleave if config.axis else Tensor.repeat",
        "Tensor.repeat if config.axis else Tensor.repeat_interleave",
    ),
    Fault("hqq-ternary-as-one-bit", _SETTINGS, "2 if abs(nbits - TERNARY)", "1 if abs(nbits - TERNARY)"),
    Fault("hqq-quantized-zeros-as-plain", _SETTINGS, '("quant_zero", 0), ', ""),
    Fault(
        "hqq-rounded-to-the-scale",
        _HQQ,
        "torch.promote_types(TORCH[config.compute_dtype], self.scale.dtype)",
        "self.scale.dtype",
    ),
    Fault("hqq-fused-with-one-scale", _HQQ, '{"text": "P K"}', '{"text": "1 K"}'),
)
