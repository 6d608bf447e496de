"""`python -m qload.testing.faults`."""

import sys

from qload.testing.faults.run import main

sys.exit(main(sys.argv[1:]))
