"""Where the tests, their input from outside and their goldens lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
GOLDEN = ROOT / "golden"
FIXTURES = ROOT / "fixtures"
# Whose fixtures are read: all but those that are there to be refused.
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name != "refused")


def cases(*formats: str) -> list[Path]:
    """The fixture folders of these formats that hold a checkpoint."""
    folders = (folder for weight_type in formats for folder in (FIXTURES / weight_type).iterdir())
    return sorted(folder for folder in folders if (folder / "config.json").is_file())
