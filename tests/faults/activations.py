"""Faults of quantized activations: scales, codes, parts, shares and forgotten schemes."""

from tests.faults.fault import Fault

_MADE, _DECLARED = "qload/kernels/activations.py", "qload/kernels/declared.py"
_SCALED, _CARRIES = "qload/kernels/scaled.py", "qload/kernels/products.py"
_INPUTS = "qload/kernels/quantized_inputs.py"
_SLICES, _PRODUCTS = "qload/kernels/products.py", "qload/kernels/products.py"
_OUTPUTS = "qload/spec/output_slices.py"
_PLANS, _DESCRIPTION = "qload/kernels/plans.py", "qload/loader/description.py"

FAULTS = (
    Fault(
        "inputs-scale-127",
        _MADE,
        "most = (2**scheme.bits - 1) / 2 if",
        "most = 2 ** (scheme.bits - 1) - 1 if",
    ),
    Fault("inputs-narrow-range", _MADE, "scaled.clamp(-half, half - 1)", "scaled.clamp(1 - half, half - 1)"),
    Fault(
        "inputs-half-away-from-zero",
        _MADE,
        "scaled.clamp(-half, half - 1).round()",
        "(scaled.clamp(-half, half - 1).abs() + 0.5).floor().copysign(scaled)",
    ),
    Fault("inputs-fp8-wraps", _MADE, "scaled = scaled.clamp(-most, most)", "scaled = scaled + 0"),
    Fault(
        "inputs-stored-scale-ignored",
        _MADE,
        "stored = None if scale is None else scale.reshape(1)",
        "stored = None if scale is None else torch.ones_like(scale).reshape(1)",
    ),
    Fault(
        "inputs-token-is-tensor",
        _MADE,
        'if scheme.strategy == "token":',
        'if scheme.strategy == "":',
    ),
    Fault(
        "inputs-groups-across",
        _MADE,
        "x.shape[-1] // scheme.size, scheme.size).amax(-1)",
        "scheme.size, x.shape[-1] // scheme.size).amax(-2)",
    ),
    Fault(
        "inputs-zero-point-unread",
        _MADE,
        "None if zero_point is None else zero_point",
        "None if True else zero_point",
    ),
    Fault("inputs-zero-point-kept-in", _MADE, "self.codes if zeros is None else", "self.codes if True else"),
    Fault("inputs-zero-not-in-range", _MADE, "(2,)).clamp(min=0)", "(2,))"),
    Fault("inputs-nearer-power", _MADE, "NEXT_POWER = 0.875", "NEXT_POWER = 0.75"),
    Fault(
        "inputs-power-too-small", _MADE, "(largest / most).log2().ceil()", "(largest / most).log2().floor()"
    ),
    Fault(
        "inputs-global-scale-multiplies",
        _MADE,
        "return scales, scales / divisor",
        "return scales, scales * divisor",
    ),
    Fault("inputs-bound-ignored", _MADE, "if scheme.upper_bound is None else", "if True else"),
    Fault("inputs-own-maximum", _MADE, "largest if maximum is None else maximum(largest)", "largest"),
    Fault(
        "inputs-own-maximum-unasked",
        _DECLARED,
        "if maximum is None and scheme.finds_maxima",
        "if False and scheme.finds_maxima",
    ),
    Fault("inputs-first-part-for-all", _DECLARED, "return stored[part]", "return stored[0]"),
    Fault(
        "inputs-quantized-when-asked-not-to", _PLANS, 'activations == "declared" else None', "True else None"
    ),
    Fault("inputs-never-quantized", _PLANS, 'activations == "declared" else None', "False else None"),
    Fault(
        "inputs-apart-fused",
        _DESCRIPTION,
        '("parts of a fused layer quantize inputs apart", *_schemes(first, other)),',
        "",
    ),
    Fault(
        "inputs-scheme-left-behind",
        "qload/loader/formats.py",
        '"activations": first.layer.format.activations,',
        '"activations": None,',
    ),
    Fault("inputs-zero-points-not-taken-off", _SCALED, "* found[M]", "* 0 * found[M]"),
    Fault("inputs-scales-of-outputs-divided", _SCALED, "part.mul_(each.column)", "part.div_(each.column)"),
    Fault(
        "inputs-in-float16-brought-back-alone",
        _INPUTS,
        "(self.made.dequantize() / row).to(dtype)",
        "self.made.dequantize().to(dtype)",
    ),
    Fault("float16-carries-all", _CARRIES, "off <= unit", "off == off"),
    Fault("float16-looked-at-once", _CARRIES, "tensor._version", "0"),
    Fault(
        "slices-all-from-the-first",
        _SLICES,
        "_dequantize_slice(weight, start, out)",
        "_dequantize_slice(weight, 0, out)",
    ),
    Fault("outputs-of-the-first-part", _OUTPUTS, "viewed.narrow(at, min(parts), len(parts))", "viewed[:1]"),
    Fault("gradient-of-the-first-slice", _PRODUCTS, "else total.add_(part)", "else total"),
)
