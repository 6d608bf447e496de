"""Where the tests, their input from outside and their goldens lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
GOLDEN = ROOT / "golden"
FIXTURES = ROOT / "fixtures"
# Whose layers are tested one by one: all but those that are there to be refused, and whole models.
APART = ("models", "refused")
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name not in APART)


def cases(*formats: str) -> list[Path]:
    """The fixture folders of these formats that hold a checkpoint."""
    folders = (folder for weight_type in formats for folder in (FIXTURES / weight_type).iterdir())
    return sorted(folder for folder in folders if (folder / "config.json").is_file())
