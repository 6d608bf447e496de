"""Test the tester: faults planted in a kernel, and which checks, or which tests of its own, notice."""

from qload.testing.selftest.adopted import Outcome, adopted_matrix
from qload.testing.selftest.matrix import KillRow, kill_matrix

__all__ = ["KillRow", "Outcome", "adopted_matrix", "kill_matrix"]
