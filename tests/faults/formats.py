"""Faults of the other quantizers: EXL2, EETQ, FP8, bitsandbytes, compressed-tensors, four-bit floats, and
of who is quantized at all."""

from tests.faults.fault import Fault

_EXL2, _GROUPS = "qload/formats/exl2.py", "qload/layouts/exl2.py"
_EXL3, _TRELLIS = "qload/formats/exl3.py", "qload/layouts/exl3.py"
_FP8, _BNB = "qload/formats/fp8.py", "qload/formats/bnb.py"
_FNUZ, _BLOCKS = "qload/kernel_formats/fp8_fnuz.py", "qload/spec/blocks.py"
_PACK, _INT = "qload/formats/compressed_tensors/words.py", "qload/formats/compressed_tensors/integers.py"
_ONE, _AWQ = "qload/formats/compressed_tensors/packed_tensor.py", "qload/formats/modelopt_awq.py"
_SMOOTH, _MODELOPT = "qload/formats/modelopt_int8.py", "qload/detect/methods/modelopt.py"
_ROUND = "qload/detect/methods/auto_round.py"
_FP4, _NV = "qload/layouts/fp4.py", "qload/formats/nvfp4.py"
_TURNS, _COMFY = "qload/spec/transforms.py", "qload/storage/comfy.py"
_MARKS = "qload/detect/methods/comfy.py"
_MATCHING, _NAMES = "qload/configs/matching.py", "qload/loader/exclusion.py"

FAULTS = (
    Fault("exl2-scale-not-squared", _EXL2, ".add(1).square()", ".add(1)"),
    Fault("exl2-scale-from-zero", _EXL2, ".unpack(q_scale).add(1)", ".unpack(q_scale)"),
    Fault("exl2-unit-unrounded", _EXL2, "(q_scale_max.float() / 256).half()", "q_scale_max.float() / 256"),
    Fault(
        "exl2-order-inverted",
        _EXL2,
        "as_positions(self.q_invperm)\n",
        "as_positions(self.q_invperm).argsort()\n",
    ),
    Fault(
        "exl2-sixteen-bits-signed",
        _EXL2,
        "wide % (1 << 16) if index.dtype == torch.int16 else wide",
        "wide",
    ),
    Fault(
        "exl2-map-counts-from-one",
        _GROUPS,
        "left = self.rows.cumsum(0)[group] -",
        "left = -1 + self.rows.cumsum(0)[group] -",
    ),
    Fault("exl2-starts-signed", _GROUPS, "starts = stored % START_LIMIT", "starts = stored + 0"),
    Fault("exl2-six-bits-as-they-come", _GROUPS, "if bits not in (5, 6):", "if bits != 5:"),
    Fault("exl3-half-steps-ignored", _TRELLIS, "(weight + 1) // 2 * (bits % 1 != 0)", "0"),
    Fault("exl3-ring-open", _TRELLIS, "halves.roll(-1, -1)", "halves.roll(-1, -1) * (halves >= 0)"),
    Fault("exl3-3inst-without-increment", _TRELLIS, 'INCREMENT * (codebook == "3inst")', "0"),
    Fault("exl3-value-unrounded", _TRELLIS, "(low + high).half().float()", "low + high"),
    Fault("exl3-signs-from-the-top", _EXL3, ">> torch.arange(TILE", ">> torch.arange(TILE - 1, -1, -1"),
    Fault("exl3-rows-are-outputs", _TRELLIS, "permute(1, 4, 2, 0, 5, 3, 6)", "permute(0, 5, 3, 6, 1, 4, 2)"),
    Fault("exl3-scales-of-one-side", _EXL3, "(wide * inputs * outputs[", "(wide * outputs["),
    Fault("exl3-any-multiplier", _EXL3, "if multiplier != expected:", "if False:"),
    Fault(
        "exl3-cut-within-a-matrix",
        _EXL3,
        "K@{BLOCK}/{TILE} N@{BLOCK}/{TILE}",
        "K/{TILE} N/{TILE}",
    ),
    Fault("eetq-pairs-apart", "qload/layouts/eetq.py", "np (kt u x t r h)", "np (u kt x t r h)"),
    Fault(
        "eetq-zero-127",
        "qload/formats/eetq.py",
        "torch.full_like(scales, 2 ** (BITS - 1),",
        "torch.full_like(scales, 127,",
    ),
    Fault("eetq-cut-anywhere", "qload/formats/eetq.py", '"K@64 N@64"', '"K@2 N@2"'),
    Fault(
        "fp8-inverse-multiplies", _FP8, "divide=self.config.divide,\n        )", "divide=False,\n        )"
    ),
    Fault(
        "fp8-blocks-transposed",
        _BLOCKS,
        "    rows, columns = block\n",
        "    columns, rows = block\n",
    ),
    Fault(
        "fp8-parts-share-a-scale",
        _BLOCKS,
        "torch.arange(len(layer.parts), device=device)",
        "torch.zeros(len(layer.parts), dtype=torch.int64)",
    ),
    Fault("mistral-scale-unknown", _FP8, "(*NAMES, MISTRAL_NAMES[0])", "NAMES"),
    Fault(
        "mistral-input-scale-unknown", _FP8, '"activation_scale", MISTRAL_NAMES[1])', '"activation_scale")'
    ),
    Fault("mistral-dynamic-by-default", "qload/detect/methods/fp8.py", '!= "NO_SCALES"', '== "TENSOR"'),
    Fault(
        "mistral-beside-a-config",
        "qload/detect/config_reader.py",
        "configs if configs or model_config else",
        "configs if configs else",
    ),
    Fault("fnuz-scale-kept", _FNUZ, "(0.5 if weight.config.divide else 2)", "1"),
    Fault("fnuz-negative-zero", _FNUZ, "torch.where(stored == NEGATIVE_ZERO, 0, stored)", "stored"),
    Fault(
        "bnb-nibbles-swapped",
        _BNB,
        "NibblePairs(pairs.reshape(N, K // 2), high_first=True)",
        "NibblePairs(pairs.reshape(N, K // 2), high_first=False)",
    ),
    Fault("bnb-offset-lost", _BNB, "values * outer + config.offset", "values * outer"),
    Fault(
        "bnb-nested-by-share",
        _BNB,
        'bounds.positions(spec.Axis(f"(NK)/{config.blocksize}^"))',
        'torch.arange(kept["absmax"].numel())',
    ),
    Fault("bnb-type-unchecked", _BNB, "if state.quant_type != self.quant_type:", "if False:"),
    Fault("bnb-int8-unit", "qload/formats/bnb_int8.py", "UNIT = 1 / 127", "UNIT = 1 / 128"),
    Fault("ct-zero-of-another-sign", _INT, "zeros=zeros + middle", "zeros=middle - zeros"),
    Fault(
        "ct-blocks-transposed",
        _BLOCKS,
        "torch.arange(layer.N, device=device) // rows if rows > 1",
        "torch.arange(layer.N, device=device) // columns if rows > 1",
    ),
    Fault(
        "ct-packing-by-claim",
        "qload/layouts/compressed_tensors.py",
        "return fitting[0] if fitting else",
        "return True if said is None else",
    ),
    Fault("ct-one-zero-of-another-sign", _ONE, "zeros=stored + 2", "zeros=-stored + 2"),
    Fault(
        "ct-one-scale-for-all-parts",
        _ONE,
        "scales=scales,\n            zeros=stored +",
        "scales=scales[:1].expand_as(scales),\n            zeros=stored +",
    ),
    Fault(
        "awq-outputs-exchanged",
        _AWQ,
        "self.weight & 0xF, self.weight >> 4",
        "self.weight >> 4, self.weight & 0xF",
    ),
    Fault("awq-codes-unsigned", _AWQ, ".reshape(self.shape) ^ SIGN_BIT", ".reshape(self.shape)"),
    Fault(
        "awq-inputs-unscaled", "qload/kernels/products.py", "        if factors is None:", "        if True:"
    ),
    Fault("awq-factors-of-the-first", _AWQ, "Role.SCALE, fact=True,", "Role.SCALE,"),
    Fault("modelopt-int8-zero", _SMOOTH, "ZERO = 128", "ZERO = 127"),
    Fault(
        "modelopt-int8-inputs-unscaled", _SMOOTH, "        return self.pre_quant_scale", "        return None"
    ),
    Fault(
        "modelopt-case-counts", _MODELOPT, "stated.upper(), max(size or 0, 0)", "stated, max(size or 0, 0)"
    ),
    Fault("modelopt-fp8-inputs-groups-of-16", _MODELOPT, "ExtendedConfig(32)", "ExtendedConfig(16)"),
    Fault("modelopt-experts-of-a-stack-plain", _MODELOPT, 'path.endswith("experts")', "False"),
    Fault(
        "modelopt-second-scale-left-over", _MODELOPT, "fp8_inputs=name == AWQ_FP8_INPUTS", "fp8_inputs=False"
    ),
    Fault(
        "transform-of-inputs-not-undone",
        _TURNS,
        "self.inputs.sums(weight, transposed=True)",
        "self.inputs.sums(weight)",
    ),
    Fault(
        "transform-inverse-ignored", _TURNS, "matrix.T if transposed else matrix, np.int8", "matrix, np.int8"
    ),
    Fault(
        "transform-scale-of-one-side",
        _TURNS,
        "self.outputs.sums(weight.T).T, scale * self.outputs.size",
        "self.outputs.sums(weight.T).T, self.outputs.size",
    ),
    Fault(
        "transform-cut-within-a-block",
        "qload/loader/sharding.py",
        "if place % _transform_step(layer, dim):",
        "if False:",
    ),
    Fault(
        "transform-outputs-of-bias",
        "qload/kernels/plans.py",
        "return (y if bias is None else y + bias).to(x.dtype)",
        "return (y if bias is None else y - bias).to(x.dtype)",
    ),
    Fault(
        "transform-fused-with-another",
        "qload/loader/description.py",
        "first.transforms, other.transforms)",
        "None, None)",
    ),
    Fault("comfy-low-nibble-first", _COMFY, "packed << 4 | packed >> 4", "packed"),
    Fault(
        "comfy-tiles-as-stored",
        _COMFY,
        "ascontiguousarray(plain_scales(stored, rows, groups))",
        "resize(stored, (rows, groups))",
    ),
    Fault("comfy-signed-as-unsigned", _COMFY, "SIGN_BITS = 0x88", "SIGN_BITS = 0"),
    Fault(
        "comfy-w4a8-unrounded", "qload/formats/comfy.py", "relative.round().clamp", "relative.floor().clamp"
    ),
    Fault(
        "comfy-awq-offset-subtracted",
        "qload/formats/comfy.py",
        "offsets=-self.weight_zeros",
        "offsets=self.weight_zeros",
    ),
    Fault("comfy-never-rotated", _MARKS, "if mark.format not in ROTATED_FORMATS or not rotated:", "if mark:"),
    Fault("comfy-one-scale-of-many", _COMFY, "rows // stored.size, 0)", "rows, 0)[:rows]"),
    Fault("svd-term-lost", _NV, "super().codes(), low_rank=self.low_rank", "super().codes()"),
    Fault("svd-factors-fused", _NV, "stored=LOW_RANK[0], fact=True", "stored=LOW_RANK[0]"),
    Fault(
        "svd-term-rounded-before",
        "qload/spec/weight.py",
        "(factor.double() for factor in self.low_rank)",
        "(factor.float() for factor in self.low_rank)",
    ),
    Fault(
        "svd-term-of-quantized-inputs",
        "qload/kernels/plans.py",
        "if weight.low_rank is not None:",
        "if False:",
    ),
    Fault(
        "fp8-spread-blocks-refused",
        _FP8,
        '{self.grid: "block", self.modelopt_grid: "block"}',
        '{self.grid: "block"}',
    ),
    Fault(
        "fp8-lone-block-anywhere",
        _FP8,
        "shape == (1,) == tuple(set(_shape(self.grid, sizes)))",
        "shape == (1,)",
    ),
    Fault(
        "modelopt-table-unread",
        _MODELOPT,
        "rules=_rules(section, table)",
        "rules=()",
    ),
    Fault(
        "unused-scale-judged",
        "qload/formats/unquantized.py",
        "Role.UNUSED, optional=True",
        "Role.SCALE, optional=True",
    ),
    Fault(
        "ct-shape-unread",
        _PACK,
        "shape = config.shape or (N, K or capacity) if fact is None else tuple(fact.tolist())",
        "shape = self.shape or (N, K or capacity)",
    ),
    Fault(
        "ct-last-word-short",
        "qload/layouts/compressed_tensors.py",
        "full[:, : words(count, bits, dense)]",
        "full[:, : count * bits // WORD_BITS]",
    ),
    Fault(
        "fp4-nibbles-swapped",
        "qload/layouts/fp4.py",
        "halves[::-1] if self.high_first else halves",
        "halves[::-1]",
    ),
    Fault("fp4-three-is-two-and-a-half", _FP4, "2.0, 3.0, 4.0, 6.0", "2.0, 2.5, 4.0, 6.0"),
    Fault("e8m0-nan-is-a-number", _FP4, ".masked_fill(exponents == 255, NAN)", ""),
    Fault("e8m0-zero", _FP4, ".masked_fill(exponents == 0, HALF)", ""),
    Fault(
        "nvfp4-global-multiplies",
        _NV,
        "divides: ClassVar[bool] = True",
        "divides: ClassVar[bool] = False",
    ),
    Fault(
        "modelopt-global-divides",
        _BLOCKS,
        "return scales.float() / column if divides else scales.float() * column",
        "return scales.float() / column",
    ),
    Fault(
        "excluded-by-substring",
        _NAMES,
        "found = [self._runs[run] for run in runs if run in self._runs]",
        'found = [place for entry, place in self._runs.items() if ".".join(entry) in prefix]',
    ),
    Fault(
        "excluded-and-quantized",
        "qload/loader/formats.py",
        "if entry is not None:",
        "if False:",
    ),
    Fault("ignored-by-ending", _MATCHING, 'name.endswith(f".{entry}")', "name.endswith(entry)"),
    Fault(
        "classes-before-names",
        _MATCHING,
        "return 1 if is_regex(entry) else {LINEAR_CLASS: 3, EMBEDDING_CLASS: 2}.get(entry, 0)",
        "return 0 if entry == LINEAR_CLASS else 1",
    ),
    Fault(
        "dynamic-last-rule-wins",
        "qload/configs/matching.py",
        "for entry, formats in rules.items()\n        ),",
        "for entry, formats in reversed(rules.items())\n        ),",
    ),
    Fault(
        "zeros-are-an-index",
        "qload/formats/gptq.py",
        "return replace(config, positional=G > 1, indexed=False)",
        "return replace(config, positional=False, indexed=False)",
    ),
    Fault(
        "zero-points-of-0-in-one-way",
        "qload/spec/zero_point_evidence.py",
        "return WHOLE if apart > margin else FIELDS if -apart > margin else None",
        "return WHOLE",
    ),
    Fault(
        "dynamic-rule-with-base-claims",
        "qload/detect/methods/gptq.py",
        "claims = replace(base.claims, source=source, **stated)",
        "claims = replace(base.claims, source=source)",
    ),
    Fault(
        "contradiction-loaded",
        "qload/loader/formats.py",
        "if layer.contradiction is not None:",
        "if layer.contradiction is None and layer.contradiction:",
    ),
    Fault(
        "auto-round-zeros-as-stored",
        _ROUND,
        '"auto_gptq": STORED_MINUS_ONE,',
        '"auto_gptq": Stored(),',
    ),
    Fault("auto-round-groups-of-outputs", _ROUND, "else (1, size)", "else (size, 1)"),
    Fault(
        "auto-round-one-scale-by-default",
        _ROUND,
        '"tensor" if size == 0 else "channel"',
        '"channel" if size == 0 else "tensor"',
    ),
    Fault(
        "auto-round-fake-quantized",
        _ROUND,
        "if packing == FAKE_PACKING:\n            return",
        "if False:\n            return",
    ),
    Fault(
        "auto-round-patterns-before-names",
        _ROUND,
        "key=lambda item: _is_pattern(item[0]))",
        "key=lambda item: not _is_pattern(item[0]))",
    ),
    Fault(
        "vocabulary-cut-in-words",
        "qload/loader/sharding.py",
        "return -(-width // (ranks * block)) * block",
        "return -(-width // ranks)",
    ),
    Fault(
        "policy-quantizes-all",
        "qload/quantize/loading.py",
        "return self.policy is None or self.policy.quantizes(prefix)",
        "return True",
    ),
    Fault(
        "quantized-by-share",
        "qload/quantize/loading.py",
        'if self.statistics == "share":',
        "if split:",
    ),
)
