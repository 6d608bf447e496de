"""Pages of reports: what they hold, that nothing of a file is markup there, and that nothing is loaded."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qload import explain, verify
from qload.checkpoint import Coverage, LayerInfo
from qload.errors.rules import rule_pages, rule_texts
from qload.pictures import LAYOUTS, explanation_page, report_page
from qload.pictures.drawing import LAYOUT_OF_FORMAT, draw_formats
from qload.pictures.histograms import LayerPictures
from qload.pictures.html_pages import Page, ReportTable, escape_controls
from qload.verify import Report
from qload.verify.report import Finding, new_finding
from tests.paths import FIXTURES

MODEL = FIXTURES / "models" / "gptq_mixtral"
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\x1b[31m\u202e"
SHOWN = "</script><img src=x onerror=alert(1)>&amp;\\x1b[31m\\u202e"


def layer(name: str, size: int = 10, bits: int | None = 4) -> LayerInfo:
    return LayerInfo(name, "gptq", bits, 128, True, False, (64, 32), "float16", size)


def report(*findings: Finding, layers: tuple[LayerInfo, ...] = ()) -> Report:
    return Report("model", findings, layers=layers)


def tables(text: str) -> list[dict[str, Any]]:
    """The rows of each table, as the page's script reads them."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    found: list[dict[str, Any]] = json.loads(data)
    return found


def test_a_report_has_findings_layers_and_the_text_of_each_rule() -> None:
    found = new_finding(rule_texts()["constant-values"], "a.b.qweight", "f.safetensors", "all codes are 7")
    text = report_page(report(found, layers=(layer("a.b"), layer("a"))))
    findings, layers = tables(text)

    assert findings["rows"] == [
        [
            "constant-values", "error", "a.b.qweight", "f.safetensors", "all codes are 7",
            "fetch or write the checkpoint again",
        ]
    ]  # fmt: skip
    assert findings["link"] == 0
    assert [(row[0], row[-1]) for row in layers["rows"]] == [("a.b", 1), ("a", 0)]
    assert text.count("<article ") == 1
    assert '<article id="constant-values">' in text
    assert '<p class="verdict bad">findings</p>' in text


def test_findings_of_one_cause_are_one_row_with_their_places() -> None:
    names = [f"l.{number}.qweight" for number in range(14)]
    found = [Finding("hole", "error", name, "f.safetensors", f"{name}: 3 of 9 bytes") for name in names]
    other = replace(found[0], file="g.safetensors", tensor="h.qweight", message="h.qweight: 4 of 9 bytes")
    alone = Finding("dtype", "error", "h.w", "g.safetensors", "h.w: complex")

    first, second = tables(report_page(report(*found, other, alone, layers=(layer("l.3"),))))
    columns, (several, single) = first["columns"], first["rows"]

    assert first["numbers"] == [columns.index("places")]
    assert several[columns.index("tensor")] == "h.qweight\nl.{0..13}.qweight"
    assert (several[columns.index("places")], single[columns.index("places")]) == (15, None)
    assert several[columns.index("file")] is None  # they are in two
    assert several[columns.index("message")] == "for example l.0.qweight: 3 of 9 bytes"
    assert second["rows"][0][-1] == 1  # of its own


def test_layers_are_those_of_the_report() -> None:
    found = verify(MODEL)
    rows = tables(report_page(found))[1]

    assert [row[0] for row in rows["rows"]] == [each.prefix for each in found.layers]
    assert [rows["columns"][at] for at in rows["numbers"]] == [
        "bits",
        "group size",
        "N",
        "K",
        "bytes",
        "findings",
    ]


@pytest.mark.parametrize("place", ["tensor", "message", "layer", "path", "note", "claim"])
def test_nothing_of_a_file_is_markup_or_hidden(place: str) -> None:
    finding = Finding(
        "dtype", "error", *(HOSTILE if place == name else "-" for name in ("tensor", "", "message"))
    )
    page = replace(
        report(finding, layers=(layer(HOSTILE if place == "layer" else "a"),)),
        path=HOSTILE if place == "path" else "model",
        notes=(HOSTILE if place == "note" else "-",),
        claims={"method": HOSTILE if place == "claim" else "-"},
    )
    text = report_page(page)

    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert SHOWN in html.unescape(text) or SHOWN in json.dumps(tables(text)).replace("\\\\", "\\")


def test_the_page_loads_nothing_and_runs_its_own_script_alone() -> None:
    text = report_page(report())
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)

    for kind, content in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in html.unescape(policy)
    assert html.unescape(policy).startswith("default-src 'none'; ")
    assert not re.search(r"https?://|src=|url\(|@import", text)
    assert "style=" not in text


def test_which_share_of_the_bytes_is_explained_is_a_bar() -> None:
    coverage = Coverage(3, 0, 200, 150, {"why": 20, "also": 10}, 0, 0, 20)
    text = report_page(replace(report(), coverage=coverage))

    assert re.findall(r'class="part(\d)" x="([\d.]+)" y="0" width="([\d.]+)"', text) == [
        ("1", "0", "75.0"),
        ("2", "75.0", "15.0"),
        ("3", "90.0", "10.0"),
    ]
    assert "exempt, for a reason: 15.0 %, 30 bytes" in text


def test_columns_without_a_value_are_left_out_and_numbers_follow() -> None:
    rows: list[dict[str, str | int | None]] = [
        {"a": "x", "b": None, "c": 1},
        {"a": "y", "b": None, "c": None},
    ]
    filled, nameless = ReportTable("T", rows, ["b", "c"]), ReportTable("U", [{"a": None, "b": None}])
    (first, second, empty) = tables(Page("t", "ok", {}, [filled, nameless, ReportTable("V", [])]).html())

    assert (first["columns"], first["rows"], first["numbers"]) == (["a", "c"], [["x", 1], ["y", None]], [1])
    assert (second["columns"], second["rows"]) == (["a"], [[None]])
    assert (empty["columns"], empty["rows"]) == ([], [])


def test_pictures_are_columns_that_the_script_draws() -> None:
    some = LayerPictures("2^-9: 3 10", "0.1: 50 05")
    text = report_page(report(layers=(layer("a"), layer("b"))), {"b": some})
    (_, layers) = tables(text)
    at = {name: place for place, name in enumerate(layers["columns"])}

    assert layers["drawn"] == {str(at["sizes of scales"]): "bars", str(at["error"]): "map"}
    assert [row[at["error"]] for row in layers["rows"]] == [None, "0.1: 50 05"]
    assert layers["rows"][1][at["sizes of scales"]] == "2^-9: 3 10"


def test_without_pictures_there_are_no_columns_of_them() -> None:
    assert tables(report_page(report(layers=(layer("a"),))))[1]["drawn"] == {}


def test_each_layout_is_drawn_once_and_says_nothing_that_a_policy_forbids() -> None:
    wide = replace(layer("c"), bits=8)
    text = report_page(report(layers=(layer("a"), layer("b"), wide, replace(layer("d"), format="fp8"))))

    assert re.findall('<details class="layout"><summary>(.*?)</summary>', text) == [
        "gptq, 4 bits",
        "gptq, 8 bits",
    ]
    assert "row 7, column 0: bits 28 to 31" in text
    assert text.count("<style>") == 1
    assert "xmlns" not in text


@pytest.mark.parametrize("name", LAYOUT_OF_FORMAT)
def test_formats_that_are_drawn_have_that_layout(name: str) -> None:
    assert [*draw_formats([(name, 4)])] == [f"{LAYOUT_OF_FORMAT[name]}, 4 bits"]
    assert LAYOUT_OF_FORMAT[name] in LAYOUTS
    assert draw_formats([(name, None), (None, 4), ("unquantized", 16)]) == {}


def test_an_explanation_draws_what_is_stored_and_what_kernels_read() -> None:
    text = explanation_page(explain(MODEL, arch="sm90"))

    assert re.findall('<details class="layout"><summary>(.*?)</summary>', text)[0] == "gptq, 4 bits"
    assert "a lane loads 4 words at once" in text


def test_text_that_is_too_long_says_so() -> None:
    assert escape_controls("x" * 5000).endswith("x... (5000 characters)")
    assert len(escape_controls("x" * 5000)) < 4100
    assert escape_controls("two\nlines") == "two\nlines"


def test_an_explanation_has_a_column_for_each_number_of_tokens_and_all_reasons() -> None:
    found = explain(MODEL, arch="sm90", tokens=(1, 64))
    text = explanation_page(found)
    (rows,) = tables(text)
    told = {row[0]: dict(zip(rows["columns"], row, strict=True)) for row in rows["rows"]}
    some = next(each for each in found.layers if len({choice.kernel for choice in each.choices}) > 1)

    assert [told[some.prefix][f"{n} token{'s' * (n > 1)}"] for n in (1, 64)] == [
        f"{c.kernel}, not measured" for c in some.choices
    ]
    reasons = told[some.prefix]["reasons against others"].split("\n")
    assert len(reasons) == len(set(reasons))
    for choice in some.choices:
        assert {f"{name}: {why}" for name, why in choice.refused.items()} <= {*reasons}


def test_what_cannot_be_explained_says_why() -> None:
    found = replace(explain(MODEL, arch="sm90"), layers=(), unreadable="no file")

    assert "<dd>no file</dd>" in explanation_page(found)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_draws_sorts_and_filters(tmp_path: Path) -> None:
    """On elements that remember what was done to them: bars as high as counts, a square for each digit."""
    layers = tuple(layer(f"model.layers.{at}") for at in range(1000))
    pictures = {"model.layers.0": LayerPictures("2^-2: 1 0 4", "0.1: 09 50")}
    page = tmp_path / "page.html"
    page.write_text(report_page(report(layers=layers), pictures))
    script = Path(__file__).parent / "page_in_node.js"
    told, wide = (
        json.loads(
            subprocess.run(
                ["node", script, page, "LAYERS.77 gptq", width], capture_output=True, text=True, check=True
            ).stdout
        )
        for width in ("400", "401")
    )
    bars, error = told["drawn"]

    assert (told["look"], wide["look"]) == ("table", "table cards")  # of a table in 400 pixels
    assert told["titles"] == tables(page.read_text())[1]["columns"]

    assert (told["first"], told["small"]) == (200, "11 of 1000")
    assert [told["names"][at] for at in (2, 10)] == ["model.layers.2", "model.layers.10"]
    assert (bars["title"], bars["width"]) == ("2^-2: 1 0 4", 18)
    assert [rect[1:] for rect in bars["rects"]] == [[0, 48, 5, 16], [6, 64, 5, 0], [12, 0, 5, 64]]
    assert [rect[1:] for rect in error["rects"]] == [
        [x, y, 32, 32] for y, x in ((0, 0), (0, 32), (32, 0), (32, 32))
    ]
    colors = [rect[0] for rect in error["rects"]]
    assert colors[0] == colors[3]
    assert len({*colors}) == 3


def style(selector: str) -> dict[str, str]:
    """The declarations of all rules of the page's style for one selector."""
    (sheet,) = re.findall(r"<style>(.*?)</style>", report_page(report()), re.DOTALL)
    sheet = html.unescape(sheet)
    found = [
        declarations
        for selectors, declarations in re.findall(r"([^{}]+)\{([^{}]*)\}", sheet)
        if selector in [each.strip() for each in selectors.split(",")]
    ]
    pairs = [each.split(":", 1) for part in found for each in part.split(";") if ":" in each]
    return {name.strip(): value.strip() for name, value in pairs}


def test_no_cell_is_kept_from_wrapping_and_cards_break_what_is_longer_than_a_line() -> None:
    for selector in ("td", "td.long", "th button", "dd", ".cards td"):
        assert style(selector).get("white-space") in (None, "pre-line")
    assert (style(".cards td")["display"], style(".cards td")["overflow-wrap"]) == ("block", "anywhere")
    assert style(".cards td::before")["content"] == 'attr(data-title) ": "'
    assert style("pre")["white-space"] == "pre-wrap"
    for selector in ("dd", "h1", "article", "pre"):
        assert style(selector)["overflow-wrap"] == "anywhere"
    assert style(".layout svg")["max-width"] == style("canvas")["max-width"] == "100%"


def test_rules_are_rendered() -> None:
    finding = Finding("against-value", "error", "a", None, "a: differs")
    (article,) = re.findall(
        '<article id="against-value">(.*?)</article>', report_page(report(finding)), re.DOTALL
    )

    assert "<p><strong>Why it matters.</strong> " in article
    assert article.count("<li>") == 4
    assert "(<code>gptq</code>, <code>gptq_v2</code>)" in article
    assert not re.search(r"`|\*\*|^- ", article, re.MULTILINE)


def test_an_explanation_is_text_whatever_is_in_it() -> None:
    text = Page("t", "ok", {}, [], explanations={"rule": f"**{HOSTILE}**"}).html()

    assert "<img" not in text
    assert f"<strong>{html.escape(SHOWN)}</strong>" in text


def test_a_message_does_not_repeat_the_tensor_beside_it() -> None:
    finding = Finding("dtype", "error", "a.b", "f", "a.b: wrong", "cast it")

    assert tables(report_page(report(finding)))[0]["rows"] == [
        ["dtype", "error", "a.b", "f", "wrong", "cast it"]
    ]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [420, 700, 1300])
def test_a_browser_cuts_nothing_off_at_the_side(width: int, tmp_path: Path) -> None:
    """In a frame of that width, as a window has a least width; with names that nothing breaks."""
    name = "model.language_model.layers.0." + "unbroken" * 20 + ".weight_scale_inverse"
    findings = [
        Finding(rule, "error", name, "f.safetensors", f"{name}: " + "m" * 300, "r " * 90)
        for rule in rule_pages()
    ]
    layers = [layer(f"{name}{at}") for at in range(300)]
    pictures = {each.prefix: LayerPictures("2^-40: " + "1 " * 60 + "1", "0.1: 09 50") for each in layers}
    text = report_page(replace(report(*findings, layers=tuple(layers)), path="p" * 300), pictures)
    probe = """<script>addEventListener("load", () => {
for (const each of document.querySelectorAll("details")) each.open = true;
const places = [document.documentElement, ...document.querySelectorAll(".scroll, article, details, dl")];
parent.postMessage([innerWidth, ...places.map((each) => each.scrollWidth - each.clientWidth)], "*");
});</script></body>"""
    (tmp_path / "page.html").write_text(re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", probe))
    outer = (
        "<script>onmessage = (told) => (document.title = JSON.stringify(told.data));</script>"
        f'<iframe src="page.html" style="border:0;width:{width}px;height:900px"></iframe>'
    )
    (tmp_path / "outer.html").write_text(outer)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run(
        [
            "chromium",
            *options,
            "--virtual-time-budget=20000",
            "--dump-dom",
            (tmp_path / "outer.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    seen, *over = json.loads(re.findall("<title>(.*?)</title>", done.stdout)[0])

    assert (seen, len(over)) == (width, len(rule_pages()) + 5)
    assert max(over) <= 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_sorts_filters_and_shows_ten_thousand_layers(tmp_path: Path) -> None:
    """Layer 2 stands before layer 10, and only 200 rows are elements."""
    layers = [layer(f"model.layers.{at}", 10_000 - at, None if at == 5 else 4) for at in range(10_000)]
    text = report_page(report(layers=tuple(layers)))
    probe = """<script>
const section = document.querySelectorAll("section.table")[0], told = {};
const cell = (row, at) => section.querySelectorAll("tbody tr")[row].children[at].textContent;
const click = (at) => section.querySelectorAll("th button")[at].click();
told.rows = section.querySelectorAll("tbody tr").length;
click(0); told.names = [cell(2, 0), cell(10, 0)];
click(0); told.last = cell(0, 0);
click(section.querySelectorAll("th").length - 2); told.least = cell(0, 0);
const input = section.querySelector("input");
input.value = "LAYERS.77 gptq"; input.dispatchEvent(new Event("input"));
told.small = section.querySelector("small").textContent;
document.title = JSON.stringify(told);
</script></body>"""
    open_to_it = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", probe)
    (tmp_path / "page.html").write_text(open_to_it)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'user'}",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(html.unescape(re.findall("<title>(.*?)</title>", done.stdout)[0]))

    assert told == {
        "rows": 200,
        "names": ["model.layers.2", "model.layers.10"],
        "last": "model.layers.9999",
        "least": "model.layers.9999",
        "small": "111 of 10000",
    }


def test_without_jinja_it_is_said_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from qload.errors import ArgumentError

    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(ArgumentError, match=r"qload-weights\[pictures\]"):
        Page("t", "ok", {}, []).html()


def test_a_rule_has_its_reason_before_its_remedy() -> None:
    found = new_finding(rule_texts()["constant-values"], "a.b.qweight", None, "all codes are 7")
    text, rule = (
        html.unescape(re.sub("<.*?>", "", report_page(report(found)))),
        rule_pages()["constant-values"],
    )
    places = [text.index(part) for part in ("Why it matters.", first_words(rule["why"]))]
    places += [text.index(part) for part in ("Remedy.", first_words(rule["do"]))]

    assert places == sorted(places)
    assert text.index(first_words(rule["what"])) < places[0]


def first_words(markdown: str) -> str:
    """The first words of a text, up to the first mark of Markdown."""
    words = re.split(r"[`*_\[\n]", markdown)[0].strip()
    assert len(words) > 8
    return words
