"""Schemas of `torch.ops.qload`: programs and saved graphs call the operators by these names and arguments."""

from importlib import import_module
from pkgutil import walk_packages

import torch
from syrupy.assertion import SnapshotAssertion

from qload import kernels


def test_schemas_of_operators(golden: SnapshotAssertion) -> None:
    for _, name, _ in walk_packages(kernels.__path__, "qload.kernels."):
        import_module(name)
    schemas = (str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("qload::"))
    assert "\n".join(sorted(schemas)) == golden
