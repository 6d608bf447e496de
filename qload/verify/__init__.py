"""Verification of checkpoints: rules in tiers, from headers to meaning, with findings as data."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
