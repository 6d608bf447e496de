from .diagnosis import FAULT_CLASSES as FAULT_CLASSES
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
