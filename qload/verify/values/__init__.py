"""What one pass over a checkpoint's bytes measures, for all rules about values together.

A tensor is read once, in the order of its file and in pieces of a MiB: `contents` looks at its bytes,
`numbers` at its floats. `statistics` looks at the codes of some outputs of each quantized layer. The rules
decide from what was accumulated; they read again only what they accuse, to name its place.
"""

from qload.verify.values.contents import Contents, Repeats, Run
from qload.verify.values.measure import Values, measure
from qload.verify.values.numbers import Numbers
from qload.verify.values.statistics import Statistics

__all__ = ["Contents", "Numbers", "Repeats", "Run", "Statistics", "Values", "measure"]
