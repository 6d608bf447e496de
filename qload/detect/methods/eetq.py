"""`quant_method: eetq`."""

from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, Name, Section, validate
from qload.errors import UnsupportedFormatError
from qload.formats import EETQConfig, EETQWeight
from qload.loader import ConfiguredFormat

KNOWN = ("eetq (weights int8)",)
WEIGHTS = "int8"


class _EETQ(Section):
    weights: Name = None


def read(found: FoundConfig) -> Claims:
    """The claims of `quant_method: eetq`; only weights of 8 bits are read."""
    read = validate(_EETQ, found)
    weights = read.weights or WEIGHTS
    if weights != WEIGHTS:
        raise UnsupportedFormatError(
            f"eetq_{weights:.40}", f"the weights of {found.file} have no reader", KNOWN
        )
    return Claims(
        method="eetq",
        format=weights,
        bits=8,
        group_size=-1,
        sym=True,
        desc_act=None,
        file=found.file,
        section=found.section,
        exclusions=read.exclusions(),
        formats=(ConfiguredFormat(EETQWeight, EETQConfig()),),
    )
