"""Locations of golden files."""

from pathlib import Path

from syrupy.extensions.amber import AmberSnapshotExtension
from syrupy.location import PyTestLocation

from qload.testing.snapshots import TensorSnapshot
from tests.paths import GOLDEN, TESTS


class Golden(AmberSnapshotExtension):
    """Snapshots of text in golden/, a mirror of tests/: test files with equal names do not collide."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """Return the folder under golden/ for the folder of a test."""
        return str(GOLDEN / Path(test_location.filepath).parent.relative_to(TESTS))


class GoldenTensors(TensorSnapshot, Golden):
    """Snapshots of tensors, addressed by content."""
