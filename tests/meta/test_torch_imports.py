"""Modules without an import of torch: commands, files, headers, formats, loaders and reports."""

import json
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

PACKAGES = (
    "architecture", "checkpoint", "cli", "configs", "detect", "errors", "formats", "hub", "layouts", "loader",
    "native", "sentences", "spec", "storage", "weights",
)  # fmt: skip
MODULES = {
    "qload.conversion.report",
    "qload.diff.report",
    "qload.dtypes",
    "qload.experts.stacked_storage",
    "qload.plan.report",
    "qload.verify.verification",
}
# Prints each module of a JSON array on standard input with an import of torch, and the import chain.
IMPORT = """
import importlib, json, sys

sys.modules["torch"] = None
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""


def without_torch(names: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    failed: dict[str, str] = json.loads(done.stdout)
    return failed


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_modules_of_commands_headers_and_reports_do_not_import_torch() -> None:
    there = {module(path) for name in PACKAGES for path in (ROOT / "qload" / name).rglob("[!_]*.py")}
    packages = {f"qload.{name}" for name in PACKAGES}

    assert without_torch(sorted(there | packages | MODULES)) == {}
    assert without_torch(["qload.kernels.linear"]).keys() == {"qload.kernels.linear"}  # torch is missing


def test_checks_of_checkpoints_import_no_models_and_no_kernels() -> None:
    """`inspect` and `verify` need them for logits alone."""
    names = "[name for name in sys.modules if name.split('.')[1:2] in (['kernels'], ['methods'], ['models'])]"
    program = f"import qload.verify.verification, sys; print({names})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )

    assert done.stdout.strip() == "[]"
