"""The command line: a file per verb, `output.py` and `tables.py` for what they print.

Nothing here imports torch or rich before it has something to do with them, so that `qload --help`
answers at once.
"""

from qload.cli.main import main

__all__ = ["main"]
