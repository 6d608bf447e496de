"""Loaders that repack, for a kernel, what another loader reads."""

from qload.repacking.loaders import GPTQMarlinWeightsLoader, RepackingLoader

__all__ = ["GPTQMarlinWeightsLoader", "RepackingLoader"]
