"""Tests of tests: known faults planted in a kernel, and the checks or the tests of a project that notice."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
