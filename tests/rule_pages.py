"""Pages of docs/rules, written from `qload/errors/rules.md`: `python -m tests.rule_pages`.

The docs need neither torch nor qload's other dependencies, so the module of the rules is loaded by its path.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.paths import ROOT

PAGES = ROOT / "docs" / "rules"
RULES = ROOT / "qload" / "errors" / "rules.py"
HEAD = """\
# Rules of `qload verify`

Every finding has the id of its rule ([how to add one](../extending/verify-rule.md)). `exception` marks ids
that `verify` never reports.

| checked by | severity | rules |
|---|---|---|
"""


def read_records() -> Mapping[str, Any]:
    """Rule id -> record, sorted by id, by the module of `RuleText` alone, without its package."""
    spec = importlib.util.spec_from_file_location("rules", RULES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses
    spec.loader.exec_module(module)
    records: Mapping[str, Any] = module.rule_texts()
    return records


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


def index(records: Mapping[str, Any]) -> str:
    """Return the list of all rules, by stage and severity."""
    stages = ("headers", "values", "meaning", "any", "--against", "--logits", "--target", "--tp", "exception")
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
