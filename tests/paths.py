"""Where the tests, their input from outside and their goldens lie."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
GOLDEN = ROOT / "golden"
FIXTURES = ROOT / "fixtures"


def cases(*rooms: str) -> list[Path]:
    """The fixture folders of these rooms that hold a checkpoint."""
    folders = (folder for room in rooms for folder in (FIXTURES / room).iterdir())
    return sorted(folder for folder in folders if (folder / "config.json").is_file())
