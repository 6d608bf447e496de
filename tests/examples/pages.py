"""The code of the pages under docs/extending as modules: what a page shows is what runs.

Their blocks go on from each other and are marked `py`; those of other pages run alone, as `python`.
"""

import re
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

from tests.paths import ROOT

PAGES = ROOT / "docs" / "extending"
BEFORE = {"cuda-kernel": ("kernel-order",)}  # pages that go on from another


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def code(page: str) -> str:
    """All Python of a page, behind that of the pages that it goes on from."""
    pages = (*BEFORE.get(page, ()), page)
    return "\n".join(block for each in pages for block in blocks(each, "py"))


def tests(page: str) -> list[str]:
    """The names of the tests that stand on a page itself."""
    return re.findall(r"^def (test_\w+)\(", "\n".join(blocks(page, "py")), re.MULTILINE)


@cache
def module(page: str) -> ModuleType:
    """A page's Python, imported once from a file, so that errors show its lines."""
    name = f"page_{page.replace('-', '_')}"
    file = Path(mkdtemp(prefix="qload-page-"), f"{name}.py")
    file.write_text(code(page))
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[name] = made  # where dataclasses look for the names of their annotations
    spec.loader.exec_module(made)
    return made
