"""Pages of docs/rules, written from the records in the source: `python -m tests.rule_pages`.

The records are read as source text, so that the docs need neither torch nor qload's other dependencies. A
record is a call of `RuleText` with literal arguments; one without a text has no page.
"""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.paths import ROOT

PAGES = ROOT / "docs" / "rules"
RECORD = ROOT / "qload" / "errors" / "rule_text.py"
HEAD = """\
# Rules of `qload verify`

Every finding has the id of its rule ([how to add one](../extending/verify-rule.md)). `exception` marks ids
that `verify` never reports.

| checked by | severity | rules |
|---|---|---|
"""


def load_record_module() -> ModuleType:
    """The module of `RuleText` alone, without its package."""
    spec = importlib.util.spec_from_file_location("rule_text", RECORD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses
    spec.loader.exec_module(module)
    return module


def read_records() -> dict[str, Any]:
    """Rule id -> record, sorted by id."""
    make = load_record_module().RuleText
    found = [
        make(**arguments) for path in sorted((ROOT / "qload").rglob("*.py")) for arguments in calls(path)
    ]
    records = {record.id: record for record in sorted(found, key=lambda record: record.id) if record.what}
    assert len(records) == sum(bool(record.what) for record in found), "an id has two records"
    return records


def calls(path: Path) -> Iterator[dict[str, str]]:
    """Yield the arguments of each call of `RuleText` in a file."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)) if "RuleText(" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RuleText":
            yield {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}


def page(record: Any) -> str:
    """Return the Markdown page of a rule."""
    checked = "Tier: " if record.stage in ("headers", "values", "meaning", "any") else ""
    stage = f"With `{record.stage}`" if record.stage.startswith("--") else record.stage
    parts = [
        f"# {record.id}",
        f"{checked}{stage}, {record.severity}",
        record.what,
        record.measured and f"**Measured.** {record.measured}",
        f"**Why it matters.** {record.why}",
        f"**Remedy.** {record.do}",
        record.example and f"```\n{record.example}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def index(records: dict[str, Any]) -> str:
    """Return the list of all rules, by stage and severity."""
    stages = ("headers", "values", "meaning", "any", "--against", "--logits", "--tp", "exception")
    rows = []
    for stage in stages:
        for severity in ("error", "warning"):
            ids = [each.id for each in records.values() if (each.stage, each.severity) == (stage, severity)]
            name = f"With `{stage}`" if stage.startswith("--") else stage
            if ids:
                links = ", ".join(f"[{each}]({each}.md)" for each in ids)
                rows.append(f"| {name} | {severity} | {links} |")
    return HEAD + "\n".join(rows) + "\n"


def write_pages(folder: Path = PAGES) -> None:
    """Write the page of each rule, and README.md with their list; several processes may do so at once."""
    records = read_records()
    texts = {f"{rule}.md": page(record) for rule, record in records.items()} | {"README.md": index(records)}
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {file.name for file in folder.glob("*.md")} - {*texts}:
        (folder / stale).unlink(missing_ok=True)
    for name, text in texts.items():
        file, new = folder / name, folder / f"{name}.{os.getpid()}"
        if not file.exists() or file.read_text("utf-8") != text:
            new.write_text(text, encoding="utf-8")
            new.replace(file)


if __name__ == "__main__":
    write_pages()
