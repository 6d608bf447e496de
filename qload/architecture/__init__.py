"""What a model's config tells of its tensors: names, (N, K), which there are, and which share an input."""

from qload.architecture.architecture import Architecture, architecture_of
from qload.architecture.inventory import Inventory, Missing

__all__ = ["Architecture", "Inventory", "Missing", "architecture_of"]
