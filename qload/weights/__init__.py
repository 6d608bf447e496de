"""A rank's view of a checkpoint, and the ledger of what it used."""

from qload.weights.ledger import LoadReport
from qload.weights.loads import Load
from qload.weights.weights import Weights

__all__ = ["Load", "LoadReport", "Weights"]
