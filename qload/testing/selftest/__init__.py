"""Plant known faults in a kernel, and see which checks, or which tests of a project, notice them."""

from qload.testing.selftest.matrix import KillRow, kill_matrix
from qload.testing.selftest.user_tests import Outcome, adopted_matrix

__all__ = ["KillRow", "Outcome", "adopted_matrix", "kill_matrix"]
