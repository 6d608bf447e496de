"""Is this checkpoint true? Rules in tiers, from headers to meaning; findings as data."""

from qload.listing import LayerInfo
from qload.verify.examine import inspect, verify
from qload.verify.prompt import Prompt
from qload.verify.report import Finding, Report

__all__ = ["Finding", "LayerInfo", "Prompt", "Report", "inspect", "verify"]
