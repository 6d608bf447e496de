"""`quant_method: mxfp4`, as gpt-oss is stored: its experts quantized, all else plain."""

from qload.detect.files import FoundConfig
from qload.detect.matching import Globs, check, is_glob
from qload.detect.validation import Claims, Section, validate
from qload.formats import CTMXFP4Weight, MXFP4Config, MXFP4ExpertsWeight
from qload.loader import ConfiguredFormat

KNOWN = ("mxfp4 (experts)",)


def read(found: FoundConfig) -> Claims:
    """The claims of gpt-oss, whose list of what is left out has patterns."""
    read = validate(Section, found)
    check(found, "modules_to_not_convert", read.modules_to_not_convert or (), is_glob)
    return Claims(
        method="mxfp4",
        format="mxfp4",
        bits=4,
        group_size=32,
        sym=True,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(Globs),
        formats=tuple(ConfiguredFormat(one, MXFP4Config()) for one in (MXFP4ExpertsWeight, CTMXFP4Weight)),
    )
