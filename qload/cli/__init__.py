"""The command line of qload.

Modules import torch and rich only inside of functions, so `qload --help` is fast; `tables` and `layer_tables`
import rich.
"""

from qload.cli.main import main

__all__ = ["main"]
