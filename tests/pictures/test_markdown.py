"""Markdown of rule pages as HTML, in which no text is markup of its own."""

import re

import pytest

from qload.errors.rules import rule_pages
from qload.pictures.html_pages import markdown_html


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("one\ntwo\n\nthree", "<p>one two</p>\n<p>three</p>"),
        ("a `x < 1` b **c `d`** e", "<p>a <code>x &lt; 1</code> b <strong>c <code>d</code></strong> e</p>"),
        (
            "so:\n- one\n- `two`\n\nend",
            "<p>so:</p>\n<ul><li>one</li><li><code>two</code></li></ul>\n<p>end</p>",
        ),
        (
            "| a | b |\n|---|:-:|\n| `c` | d |",
            "<table><thead><tr><td>a</td><td>b</td></tr></thead><tbody><tr><td><code>c</code></td><td>d</td></tr>"
            "</tbody></table>",
        ),
        ("```\na <b>\n\n- c\n```\nd", "<pre><code>a &lt;b&gt;\n\n- c</code></pre>\n<p>d</p>"),
        ("```\nnever ended", "<pre><code>never ended</code></pre>"),
        ("see [this](known.md)", '<p>see <a href="#known">this</a></p>'),
        ("see [this](other.md) and [that](../verify.md#a)", "<p>see this and that</p>"),
        ("2**24 and 2**8", "<p>2**24 and 2**8</p>"),
        ("2 * 3 ** 4 `open", "<p>2 * 3 ** 4 `open</p>"),
        ("", ""),
    ],
)
def test_markdown_becomes_markup(text: str, markup: str) -> None:
    assert markdown_html(text, ["known"]) == markup


@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "`{}`",
        "**{}**",
        "- {}",
        "| {} |\n|---|\n| {} |",
        "```\n{}\n```",
        "[{}](known.md)",
        "[a]({})",
        "```{}",
        "{} `x` {}",
        "a **b {} `c`** {}",
    ],
)
@pytest.mark.parametrize(
    "hostile",
    ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "javascript:alert(1)", "&lt;b&gt;"],
)
def test_no_text_is_markup(frame: str, hostile: str) -> None:
    markup = markdown_html(frame.replace("{}", hostile), ["known"])

    assert not re.search(
        r"<(?!/?(p|ul|li|code|pre|strong|table|thead|tbody|tr|td|a href=\"#known\"|a)>)", markup
    )
    assert "href" not in markup.replace('href="#known"', "")


def test_no_page_of_a_rule_shows_its_signs() -> None:
    for page in rule_pages().values():
        for text in page.values():
            words = re.sub(r"<code>.*?</code>", "", markdown_html(text, [*rule_pages()]))
            assert not re.search(r"`|(?<!\d)\*\*|\]\(|^[-|]", words, re.MULTILINE)


def test_lists_and_tables_of_a_page_stay_lists_and_tables() -> None:
    markup = markdown_html(rule_pages()["against-value"]["what"])

    assert markup.count("<li>") == 4
    assert markup.count("<tr>") > 10
