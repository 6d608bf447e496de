"""Breaks qload on purpose, one seeded fault at a time: `python -m qload.testing.faults`."""

from qload.testing.faults.fault import Fault
from qload.testing.faults.tables import FAULTS

__all__ = ["FAULTS", "Fault"]
