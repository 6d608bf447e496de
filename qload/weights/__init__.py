"""`Weights`, a rank's view of a checkpoint, and its ledger."""

from qload.weights.ledger import LoadReport
from qload.weights.stream import Load
from qload.weights.weights import Weights

__all__ = ["Load", "LoadReport", "Weights"]
