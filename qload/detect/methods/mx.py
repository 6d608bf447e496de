"""OCP Microscaling: `mxfp8`, and `mxfp4` of gpt-oss.

Source: transformers 5.23.0 and sglang 0.5.23.
"""

from typing import Literal

from qload import configs
from qload.errors import UnsupportedFormatError
from qload.formats.mx import CTMXFP4Weight, MXFP4Config, MXFP4ExpertsWeight
from qload.formats.mxfp8 import GROUP, MXFP8Config, MXFP8Weight
from qload.loader import ConfiguredFormat
from qload.spec import ActivationScheme

MX_BLOCK = [1, GROUP]
MXFP8_VARIANTS = ("mxfp8",)


class _MXFP8(configs.Section):
    activation_scheme: Literal["dynamic"] | None = None
    weight_block_size: configs.Block | None = None
    scale_fmt: Literal["ue8m0"] | None = None
    ignored_layers: configs.NameList | None = None

    lists = ("modules_to_not_convert", "ignored_layers")


def read_mxfp8(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of MXFP8 as written by transformers and SGLang: 32 inputs share a power of two."""
    section = configs.validate(_MXFP8, source)
    block = section.weight_block_size
    if block not in (None, MX_BLOCK):
        reason = f"the weight_block_size of {source.file} is not supported"
        raise UnsupportedFormatError(f"mxfp8 in blocks of {block}", reason, MXFP8_VARIANTS)
    inputs = ActivationScheme("float", 8, True, "group", GROUP, scale_type="e8m0", owner="transformers")
    fmt = ConfiguredFormat(MXFP8Weight, MXFP8Config(), inputs if section.activation_scheme else None)
    return section.claims(source, "mxfp8", "mxfp8", fmt, bits=8, group_size=GROUP, sym=True)


def read_mxfp4(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of gpt-oss, with shell patterns in its list of excluded modules."""
    section = configs.validate(configs.Section, source)
    configs.check_pattern_lengths(source, "modules_to_not_convert", section.modules_to_not_convert or ())
    formats = [
        ConfiguredFormat(weight_type, MXFP4Config()) for weight_type in (MXFP4ExpertsWeight, CTMXFP4Weight)
    ]
    exclusions = section.exclusions(configs.GlobExclusions)
    return section.claims(
        source, "mxfp4", "mxfp4", *formats, bits=4, group_size=32, sym=True, exclusions=exclusions
    )


METHODS = (
    configs.Method(
        names=("mxfp8",),
        read=read_mxfp8,
        formats=(MXFP8Weight,),
        variants=MXFP8_VARIANTS,
        activation_key="activation_scheme",
    ),
    configs.Method(
        names=("mxfp4",),
        read=read_mxfp4,
        formats=(MXFP4ExpertsWeight, CTMXFP4Weight),
        variants=("mxfp4 (experts)",),
    ),
)
