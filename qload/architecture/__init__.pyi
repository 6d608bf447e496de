from .architecture import Architecture as Architecture
from .architecture import architecture_of as architecture_of
from .inventory import Inventory as Inventory
from .inventory import Missing as Missing
