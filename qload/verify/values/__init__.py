"""Measurements of one pass over a checkpoint's bytes, for all rules of values together.

A tensor is read once, in the order of its file and in pieces of a MiB: `Contents` describes its bytes,
`Numbers` its floats. `Statistics` describes the codes of some outputs of each quantized layer. Rules decide
by these measurements, and read again only to name the place of a fault.
"""

from qload.verify.values.contents import Contents, Numbers, Repeats, Run
from qload.verify.values.measure import Statistics, Values, measure

__all__ = ["Contents", "Numbers", "Repeats", "Run", "Statistics", "Values", "measure"]
