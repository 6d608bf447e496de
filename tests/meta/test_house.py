"""Structure of the project: import directions, names, sizes, and permitted imports and words."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

import qload
from tests.faults.tables import FAULTS
from tests.paths import FIXTURES, ROOT

# A module imports only from ranks to its left.
RANKS = [
    {"lazy_torch"},
    {"errors", "dtypes"},
    {"native"},
    {"sentences"},
    {"devices"},
    {"layouts"},
    {"spec"},
    {"storage", "parallel"},
    {"loader"},
    {"configs"},
    {"formats"},
    {"architecture"},
    {"detect", "quantize"},
    {"kernel_formats"},
    {"hub"},
    {"experts"},
    {"weights"},
    {"checkpoint"},
    {"kernels"},
    {"repacking"},
    {"methods"},
    {"models"},
    {"diagnosis"},
    {"plan"},
    {"engines"},
    {"verify", "testing"},
    {"diff"},
    {"conversion"},
    {"conformance"},
    {"capabilities", "pictures"},
    {"cli"},
]
RANK = {name: place for place, names in enumerate(RANKS) for name in names}
TOP = {
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml", "CHANGELOG.md",
    "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "csrc",
    "docs", "fixtures", "golden", "mkdocs.yml", "noxfile.py", "pyproject.toml", "qload", "tests",
}  # fmt: skip
VARIABLES = {
    "QLOAD_PYTHON_ONLY",
    "QLOAD_CUDA",
    "QLOAD_CUDA_ARCHS",
    "QLOAD_ISA",
    "QLOAD_NUM_THREADS",
    "QLOAD_CASES",
}
SOURCES = sorted((ROOT / "qload").rglob("*.py"))
FIXTURE_BYTES = 11 << 20


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Source:
    """Syntax tree of a file: code lines without docstrings, and names."""

    lines: int
    imports: tuple[str, ...]
    called: frozenset[str]


@cache
def source(path: Path) -> Source:
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    modules = [node for node in nodes if isinstance(node, ast.Module | ast.FunctionDef)]
    docstrings = sum(len((ast.get_docstring(node) or "").splitlines()) for node in (*classes, *modules))
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return Source(
        len(text.splitlines()) - docstrings,
        tuple(imported(nodes)),
        frozenset(call.id for call in calls if isinstance(call, ast.Name)),
    )


def imported(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield every imported module of a file, at any depth."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package(path: Path) -> str:
    return path.relative_to(ROOT / "qload").parts[0].removesuffix(".py")


@pytest.mark.parametrize("own", sorted(RANK))
def test_a_package_imports_only_from_its_left(own: str) -> None:
    files = [path for path in SOURCES if package(path) == own]
    found = [(name(path), module) for path in files for module in source(path).imports]
    seen = [(file, module, module.split(".")[1]) for file, module in found if module.startswith("qload.")]

    assert files
    assert [each for each in seen if each[2] != own and RANK[each[2]] >= RANK[own]] == []


def test_every_package_has_a_rank() -> None:
    assert {package(path) for path in SOURCES if path.parent != ROOT / "qload"} <= set(RANK)


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Include imports for types alone, and imports inside of functions."""
    modules = {module(path): path for path in SOURCES}
    graph = {
        own: {found if found in modules else found.rpartition(".")[0] for found in source(path).imports}
        & {*modules}
        for own, path in modules.items()
    }
    for own, path in modules.items():
        if path.name == "__init__.py":  # modules of a package import its exports from each other
            graph[own] = {other for other in graph[own] if other.startswith(f"{own}.")}
        graph[own] -= {own, own.rpartition(".")[0]}

    list(TopologicalSorter(graph).static_order())  # raises CycleError with the names of the modules


def test_formats_never_see_each_other() -> None:
    """A format is a module, or a package whose modules see each other."""
    folder = ROOT / "qload" / "formats"
    modules = [path for path in folder.rglob("*.py") if path != folder / "__init__.py"]
    formats = {path: path.relative_to(folder).parts[0].removesuffix(".py") for path in modules}
    for path, own in formats.items():
        seen = {found for found in source(path).imports if found.startswith("qload.formats")}
        assert {part for found in seen for part in found.split(".")[2:3]} & {*formats.values()} <= {own}


def test_a_module_of_a_format_has_at_most_300_lines() -> None:
    lines = {name(path): path.read_text().count("\n") for path in (ROOT / "qload" / "formats").rglob("*.py")}

    assert {file: count for file, count in lines.items() if count > 300} == {}


def test_a_module_has_at_most_600_lines_of_code() -> None:
    lines = {name(path): source(path).lines for path in SOURCES}

    assert {file: count for file, count in lines.items() if count > 600} == {}


def test_no_file_prints() -> None:
    assert [name(path) for path in SOURCES if "print" in source(path).called] == []


def test_only_the_agreed_environment_variables_are_read() -> None:
    texts = [path.read_text() for path in [*SOURCES, ROOT / "noxfile.py", ROOT / "pyproject.toml"]]

    assert set(re.findall(r"QLOAD_[A-Z_]+", "\n".join(texts))) <= VARIABLES


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_top_level_is_the_agreed_one() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP


def test_the_project_speaks_only_of_itself() -> None:
    machine = re.compile(r"(?<![\w.])/(work|tmp|root|opt|home)/[a-z]")
    texts = [path for path in tracked() if path.suffix in {".py", ".md", ".toml", ".json", ".pyi", ""}]

    assert [name(path) for path in texts if machine.search(path.read_text(errors="replace"))] == []


def test_fixtures_are_small_and_say_where_they_come_from() -> None:
    folders = {config.parent for config in FIXTURES.rglob("config.json")}

    assert sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()) <= FIXTURE_BYTES
    for folder in folders:
        assert tomllib.loads((folder / "ORIGIN.toml").read_text()).keys() >= {"tool", "seed"}


def test_every_nox_session_explains_itself() -> None:
    sessions = [
        node
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]

    assert {session.name for session in sessions} >= {
        "unit",
        "lint",
        "golden",
        "demo",
        "faults",
        "cases",
        "gpu",
        "native",
    }
    assert all((ast.get_docstring(session) or "").count("\n") == 0 for session in sessions)
    assert all(ast.get_docstring(session) for session in sessions)


def test_every_seeded_fault_still_applies() -> None:
    places = {fault.name: (ROOT / fault.file).read_text().count(fault.before) for fault in FAULTS}

    assert [name for name, count in places.items() if count != 1] == []
    assert [fault.name for fault in FAULTS if fault.before == fault.after] == []


def test_every_seeded_fault_can_be_asked_for_by_its_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def parameters(function: Callable[..., Any]) -> str:
    """Return names, kinds and defaults without annotations: their text depends on the version of Python."""
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def is_hidden(base: type) -> bool:
    """Return whether a class is a private base of public classes."""
    return base.__module__.startswith("qload.") and base.__name__ not in qload.__all__


def test_the_public_names_are_pinned(golden: SnapshotAssertion) -> None:
    """Compare each public name and its signature with the golden file: a changed line changes the API."""
    lines = []
    for public in sorted(qload.__all__):
        value = getattr(qload, public)
        if inspect.isclass(value) and "Error" not in public:
            own = [each for each in value.__mro__ if each is value or is_hidden(each)]
            methods = [n for c in own for n, m in vars(c).items() if not n.startswith("_") and callable(m)]
            lines += [
                public,
                *(f"    {method}{parameters(getattr(value, method))}" for method in methods),
            ]
        else:
            lines.append(public if inspect.isclass(value) else f"{public}{parameters(value)}")

    assert "\n".join(lines) == golden


def test_importing_qload_imports_no_torch() -> None:
    code = "import sys, qload; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
