"""HQQ: a typed weight, and the stored settings of a layer."""

from qload.formats.hqq.weight import HQQConfig, HQQWeight

__all__ = ["HQQConfig", "HQQWeight"]

FORMATS = (HQQWeight,)
METHODS = ()  # read by detect.methods
