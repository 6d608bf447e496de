from .fault_injection import Outcome as Outcome
from .fault_injection import adopted_matrix as adopted_matrix
from .matrix import KillRow as KillRow
from .matrix import kill_matrix as kill_matrix
