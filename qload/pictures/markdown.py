"""Markdown of rule pages as HTML: paragraphs, lists, tables, blocks of code, `code`, **bold** and links.

All text is escaped before it becomes markup, so that no text can begin a tag.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape

FENCE = "```"
INLINE = re.compile(r"`([^`]+)`|(?<!\w)\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\w)|\[([^\]]+)\]\(([^()\s]+)\)")
RULE_LINK = re.compile(r"([a-z0-9-]+)\.md")
TABLE_LINE = re.compile(r"[|\s:-]+")  # under the titles of a table


def markdown_html(text: str, rules: Sequence[str] = ()) -> str:
    """The text as HTML; a link to the page of one of `rules` leads to its explanation on this page.

    Other links are their text alone: a page of HTML needs nothing beside it.
    """
    return "\n".join(_blocks(text.split("\n"), lambda line: _inline(line, rules)))


def _blocks(lines: Sequence[str], inline: Callable[[str], str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith(FENCE):
            while end < len(lines) and not lines[end].startswith(FENCE):
                end += 1
            yield f"<pre><code>{escape(chr(10).join(lines[at + 1 : end]))}</code></pre>"
            end += 1
        elif line.startswith("- "):
            while end < len(lines) and lines[end].startswith("- "):
                end += 1
            items = (f"<li>{inline(item[2:])}</li>" for item in lines[at:end])
            yield f"<ul>{''.join(items)}</ul>"
        elif line.startswith("|"):
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield _table(lines[at:end], inline)
        elif line.strip():
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(("- ", "|", FENCE)):
                end += 1
            yield f"<p>{inline(' '.join(lines[at:end]))}</p>"
        at = end


def _table(lines: Sequence[str], inline: Callable[[str], str]) -> str:
    rows = [
        [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]
        for line in lines
        if not TABLE_LINE.fullmatch(line)
    ]
    head, *body = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _inline(text: str, rules: Sequence[str]) -> str:
    parts, done = [], 0
    for found in INLINE.finditer(text):
        parts.append(escape(text[done : found.start()]))
        code, bold, title, target = found.groups()
        if code is not None:
            parts.append(f"<code>{escape(code)}</code>")
        elif bold is not None:
            parts.append(f"<strong>{_inline(bold, rules)}</strong>")
        else:
            rule = RULE_LINK.fullmatch(target)
            known = rule is not None and rule[1] in rules
            parts.append(f'<a href="#{rule[1]}">{escape(title)}</a>' if rule and known else escape(title))
        done = found.end()
    return "".join([*parts, escape(text[done:])])
