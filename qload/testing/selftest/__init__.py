"""Tests of tests: known faults planted in a kernel, and the checks or the tests of a project that notice."""

from qload.testing.selftest.fault_injection import Outcome, adopted_matrix
from qload.testing.selftest.matrix import KillRow, kill_matrix

__all__ = ["KillRow", "Outcome", "adopted_matrix", "kill_matrix"]
