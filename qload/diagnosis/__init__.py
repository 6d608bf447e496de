"""What is wrong with a weight that was read back, in plain words: known faults, fitted to what came out."""

from qload.diagnosis.diagnosis import FAULT_CLASSES, Diagnosis, diagnose

__all__ = ["FAULT_CLASSES", "Diagnosis", "diagnose"]
