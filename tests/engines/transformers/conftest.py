"""Collection of these tests: only where the packages of the group `transformers` are installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if all(map(find_spec, ("transformers", "accelerate", "peft"))) else ["test_*.py"]
