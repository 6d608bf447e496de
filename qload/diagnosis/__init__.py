"""Diagnosis of a read-back weight: the known fault behind its errors, and their location."""

from qload.diagnosis.diagnosis import FAULT_CLASSES, Diagnosis, diagnose

__all__ = ["FAULT_CLASSES", "Diagnosis", "diagnose"]
