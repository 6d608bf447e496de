"""HQQ: a typed weight, and the settings that each layer stores."""

from qload.formats.hqq.weight import HQQConfig, HQQWeight

__all__ = ["HQQConfig", "HQQWeight"]

FORMATS = (HQQWeight,)
METHODS = ()  # read by detect.methods
