"""`quant_method: modelopt`, and `hf_quant_config.json`, which ModelOpt writes beside the other config."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from qload.detect.files import FoundConfig
from qload.detect.matching import Globs, check, is_glob
from qload.detect.validation import Claims, Name, Section, validate
from qload.errors import UnsupportedFormatError
from qload.formats import Fp8Config, Fp8Weight, ModelOptNVFP4Weight, NVFP4Config
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme

KNOWN = ("modelopt (quant_algo NVFP4, FP8)",)
FORMATS_READ = {
    "NVFP4": ConfiguredFormat(
        ModelOptNVFP4Weight,
        NVFP4Config(),
        ActivationScheme("float", 4, "local", "tensor_group", 16, scale="input_scale"),
    ),
    "FP8": ConfiguredFormat(
        Fp8Weight,
        Fp8Config("tensor"),
        ActivationScheme("float", 8, False, "tensor", scale="input_scale"),
    ),
}


Entries = Annotated[list[str], AfterValidator(lambda names: [name for name in names if name])]


class _ModelOpt(Section):
    quant_algo: str
    group_size: Literal[16] | None = None
    kv_cache_quant_algo: Name = None
    exclude_modules: Entries | None = None
    ignore: Entries | None = None
    quantized_layers: dict[str, Any] | None = None

    lists = ("exclude_modules", "ignore", "modules_to_not_convert")


def read(found: FoundConfig) -> Claims:
    """The claims of an algorithm for all layers; one algorithm a layer is refused."""
    read = validate(_ModelOpt, found)
    if read.quant_algo not in FORMATS_READ or read.quantized_layers:
        raise UnsupportedFormatError(
            f"modelopt ({read.quant_algo:.40})", f"the quant_algo of {found.file} has no reader", KNOWN
        )
    for key in read.lists:
        check(found, key, getattr(read, key) or (), is_glob)
    return Claims(
        method="modelopt",
        format=read.quant_algo.lower(),
        bits=4 if read.quant_algo == "NVFP4" else 8,
        group_size=16 if read.quant_algo == "NVFP4" else None,
        sym=True,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(Globs),
        formats=(FORMATS_READ[read.quant_algo],),
    )
