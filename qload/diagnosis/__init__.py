"""Diagnosis of a weight that was read back: the known fault that explains its errors, and their location."""

from qload.diagnosis.diagnosis import FAULT_CLASSES, Diagnosis, diagnose

__all__ = ["FAULT_CLASSES", "Diagnosis", "diagnose"]
