from .architecture import Architecture as Architecture
from .architecture import Inventory as Inventory
from .architecture import Missing as Missing
from .architecture import architecture_of as architecture_of
from .architecture import read_architecture as read_architecture
