"""Faults of Quark: signs and order of words, floats of six bits, patterns of layers."""

from tests.faults.fault import Fault

_FORMAT, _METHOD = "qload/formats/quark.py", "qload/detect/methods/quark.py"

FAULTS = (
    Fault(
        "quark-int4-unsigned", _FORMAT, "words ^ SIGNS if self.config.signed", "words if self.config.signed"
    ),
    Fault("quark-order-ignored", _FORMAT, "if self.reorder else columns(BITS)", "if True else columns(BITS)"),
    Fault("quark-signs-not-restored", _FORMAT, "signs = SIGNS if config.signed else 0", "signs = 0"),
    Fault("quark-e3m2-bias", _FORMAT, 'bias = 1 if element == "e2m3" else 3', "bias = 1"),
    Fault("quark-subnormal-normal", _FORMAT, "(exponent > 0) * 2**mantissa", "2**mantissa"),
    Fault("quark-zero-points-as-stored", _METHOD, ', zeros="checked")', ")"),
    Fault(
        "quark-entries-lost",
        _METHOD,
        "(*rules, configs.ModuleRule(_formats(default), exclusions=exclusions)) if rules",
        "() if rules",
    ),
    Fault("quark-scale-axis", _FORMAT, 'f"{groups} N", Role.SCALE', 'f"N {groups}", Role.SCALE'),
)
