"""Locations of tests, fixtures and golden files."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
GOLDEN = ROOT / "golden"
FIXTURES = ROOT / "fixtures"
# Folders outside the tests of single layers: refused layers, and whole models.
APART = ("models", "refused")
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path.name not in APART)


def cases(*formats: str) -> list[Path]:
    """Return the fixture folders of these formats with a checkpoint."""
    folders = (folder for weight_type in formats for folder in (FIXTURES / weight_type).iterdir())
    return sorted(folder for folder in folders if (folder / "config.json").is_file())
