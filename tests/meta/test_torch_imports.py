"""Modules without an import of torch: commands, files and headers, reports."""

import json
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("cli", "errors", "hub", "native", "sentences", "storage")
READS_TENSORS = {f"qload.storage.{name}" for name in ("memory", "protocol", "safetensors")}
MODULES = {
    "qload.architecture.config",
    "qload.architecture.model_tables",
    "qload.architecture.table",
    "qload.conversion.report",
    "qload.configs.found_config",
    "qload.detect.files",
    "qload.diff.report",
    "qload.checkpoint.report_base",
    "qload.plan.report",
    "qload.verify.report",
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

    assert there >= READS_TENSORS
    assert without_torch(sorted((there - READS_TENSORS) | packages | MODULES)) == {}
    assert without_torch(sorted(READS_TENSORS)).keys() == READS_TENSORS  # no other module is excluded


def test_checks_of_checkpoints_import_no_models_and_no_kernels() -> None:
    """`inspect` and `verify` need them for logits alone."""
    names = "[name for name in sys.modules if name.split('.')[1:2] in (['kernels'], ['methods'], ['models'])]"
    program = f"import qload.verify.verification, sys; print({names})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )

    assert done.stdout.strip() == "[]"
