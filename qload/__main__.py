"""`python -m qload`: the command line without an installed script."""

from qload.cli import main

main(prog_name="qload")
