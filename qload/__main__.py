"""`python -m qload`: the command line, where no script is installed."""

from qload.cli import main

main(prog_name="qload")
