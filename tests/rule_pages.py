"""The pages of docs/rules in short, as the package carries them: `python -m tests.rule_pages` writes them."""

import json
import re

from tests.paths import ROOT

PAGES = ROOT / "docs" / "rules"
WRITTEN = ROOT / "qload" / "verify" / "rules" / "pages.json"
SECTIONS = {"why": "Why it matters.", "do": "What to do."}


def short(page: str) -> dict[str, str]:
    """A page's Markdown, a line for each paragraph and item: what the rule says, why, and what to do."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraphs = [_paragraph(part) for part in text.split("\n\n")[2:]]  # under the title and the tier
    what = [part for part in paragraphs if part and not part.startswith("**")]
    found = {"what": "\n\n".join(what)}
    for key, title in SECTIONS.items():
        (paragraph,) = (part for part in paragraphs if part.startswith(f"**{title}**"))
        found[key] = paragraph.removeprefix(f"**{title}**").strip()
    return found


def _paragraph(part: str) -> str:
    """Lines joined, but for those that begin an item of a list or a row of a table."""
    lines = re.split(r"\n(?=- |\|)", part.strip())
    return "\n".join(" ".join(line.split()) for line in lines)


def pages() -> dict[str, dict[str, str]]:
    """All of them, by the rule's id."""
    files = sorted(file for file in PAGES.glob("*.md") if file.stem != "README")
    return {file.stem: short(file.read_text()) for file in files}


def written() -> str:
    """What the file of the package has to hold."""
    return json.dumps(pages(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(written())
