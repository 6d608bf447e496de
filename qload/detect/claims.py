"""What a quantization config claims, validated: a malformed one raises, it never becomes a default."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qload.detect.files import FoundConfig, shown
from qload.detect.keys import notes_of
from qload.detect.methods import (
    auto_round,
    awq,
    bnb,
    compressed_tensors,
    eetq,
    exl2,
    fp8,
    gptq,
    marlin,
    modelopt,
    mxfp4,
)
from qload.detect.signatures import METHODS_ELSEWHERE
from qload.detect.validation import Claims, agree
from qload.errors import ConfigError, UnsupportedFormatError
from qload.formats import (
    AWQWeight,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP4ExpertsWeight,
    MXFP8Weight,
    UnquantizedWeight,
)
from qload.spec import Weight

# The reader of each quant_method.
METHODS: dict[str, Callable[[FoundConfig], Claims]] = {
    "gptq": gptq.read,
    "gptq_marlin": gptq.read,
    "awq": awq.read,
    "awq_marlin": awq.read,
    "marlin": marlin.read,
    "gptq_marlin_24": marlin.read,
    "exl2": exl2.read,
    "eetq": eetq.read,
    "fp8": fp8.read,
    "fbgemm_fp8": fp8.read,
    "mxfp8": fp8.read_mxfp8,
    "bitsandbytes": bnb.read,
    "compressed-tensors": compressed_tensors.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
    "auto-round": auto_round.read,
}
ALIASES = {"intel/auto-round": "auto-round"}  # written by versions up to 0.4.7
AUTO_ROUND = (
    GPTQWeight,
    AWQWeight,
    Fp8Weight,
    CTPackWeight,
    CTIntWeight,
    CTNVFP4Weight,
    CTMXFP4Weight,
)  # by its packing_format; the first two say nothing of inputs
# Which weights each of them finds; a test holds it to the loaders that configs make.
READS: dict[str, tuple[type[Weight], ...]] = {
    "gptq": (GPTQWeight, MarlinWeight, Marlin24Weight),
    "gptq_marlin": (GPTQWeight, MarlinWeight, Marlin24Weight),
    "awq": (AWQWeight,),
    "awq_marlin": (AWQWeight,),
    "marlin": (MarlinWeight, Marlin24Weight),
    "gptq_marlin_24": (Marlin24Weight,),
    "exl2": (Exl2Weight,),
    "eetq": (EETQWeight,),
    "fp8": (Fp8Weight,),
    "fbgemm_fp8": (Fp8Weight,),
    "mxfp8": (MXFP8Weight,),
    "bitsandbytes": (BNBNF4Weight, BNBFP4Weight, BNBWeight),
    "compressed-tensors": (
        CTPackWeight,
        CTPackTensorWeight,
        CTIntWeight,
        Fp8Weight,
        Marlin24Weight,
        CTNVFP4Weight,
        CTMXFP4Weight,
        MXFP8Weight,
    ),
    "modelopt": (Fp8Weight, ModelOptNVFP4Weight, MXFP8Weight, CTMXFP4Weight, ModelOptAWQWeight),
    "mxfp4": (MXFP4ExpertsWeight, CTMXFP4Weight),
    "auto-round": AUTO_ROUND,
}
# Which key says how inputs are quantized, and of which weights.
DECLARES: dict[str, tuple[str, tuple[type[Weight], ...]]] = {
    "fp8": ("activation_scheme", (Fp8Weight,)),
    "fbgemm_fp8": ("activation_scale_ub", (Fp8Weight,)),
    "mxfp8": ("activation_scheme", (MXFP8Weight,)),
    "compressed-tensors": ("input_activations", (*READS["compressed-tensors"], UnquantizedWeight)),
    "modelopt": ("quant_algo", modelopt.DECLARING),
    "auto-round": ("act_bits", AUTO_ROUND[2:]),
}
KNOWN = (
    *gptq.KNOWN,
    *awq.KNOWN,
    *marlin.KNOWN,
    *exl2.KNOWN,
    *eetq.KNOWN,
    *fp8.KNOWN,
    *bnb.KNOWN,
    *compressed_tensors.KNOWN,
    *modelopt.KNOWN,
    *mxfp4.KNOWN,
    *auto_round.KNOWN,
)


def read_claims(found: FoundConfig) -> Claims:
    """A config's claims; ConfigError names file, key, what was expected and what is there.

    A method, or a variant of one, that this qload does not read is an UnsupportedFormatError.
    """
    method = _method(found)
    method = ALIASES.get(method, method)
    if method not in METHODS:
        reason, remedy = f"the quant_method of {found.file} has no reader", METHODS_ELSEWHERE.get(method, "")
        raise UnsupportedFormatError(method, reason, KNOWN, remedy)
    claims = METHODS[method](found)
    return replace(claims, notes=(*claims.notes, *notes_of(found, claims.method)))


def _method(found: FoundConfig) -> str:
    method = agree(found, "quant_method", "method")
    if method is None and not found.section:
        method = method_of_own_file(found.values)
    if method is None and any(key in found.values for key in compressed_tensors.KEYS):
        method = "compressed-tensors"  # of configs from before there was quant_method
    if method is None and any(found.values.get(flag) is True for flag in bnb.FLAGS):
        method = "bitsandbytes"  # of configs from before there was quant_method
    if not isinstance(method, str) or not method:
        raise ConfigError(
            found.file, found.key("quant_method"), "the name of a quantization method", shown(method)
        )
    return method


def method_of_own_file(values: Mapping[str, Any]) -> str | None:
    """The tools' own files need not name the method: AWQ's say `version`, GPTQ's say `desc_act`."""
    if any(key in values for key in ("version", "zero_point", "w_bit")):
        return "awq"
    return "gptq" if any(key in values for key in ("desc_act", "sym", "damp_percent")) else None
