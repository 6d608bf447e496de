"""Schemas of `torch.ops.qload`: programs and saved graphs call the operators by these names and arguments."""

from importlib import import_module
from pkgutil import walk_packages

import torch
from syrupy.assertion import SnapshotAssertion

from qload import kernels

EXAMPLE = "qload::quads"  # of docs/extending/kernel-order.md, which another test runs


def test_schemas_of_operators(golden: SnapshotAssertion) -> None:
    for _, name, _ in walk_packages(kernels.__path__, "qload.kernels."):
        import_module(name)
    names = {s.name: str(s) for s in torch._C._jit_get_all_schemas() if s.name.startswith("qload::")}
    schemas = (schema for name, schema in names.items() if name != EXAMPLE)
    assert "\n".join(sorted(schemas)) == golden
