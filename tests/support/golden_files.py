"""Where golden files lie."""

from pathlib import Path

from syrupy.extensions.amber import AmberSnapshotExtension
from syrupy.location import PyTestLocation

from qload.testing.snapshots import TensorSnapshot
from tests.paths import GOLDEN, TESTS


class Golden(AmberSnapshotExtension):
    """golden/ mirrors tests/, so two test files of one name do not collide."""

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        """The folder under golden/ that belongs to a test's folder."""
        return str(GOLDEN / Path(test_location.filepath).parent.relative_to(TESTS))


class GoldenTensors(TensorSnapshot, Golden):
    """The same for tensors, which are stored by content."""
