"""Matcher for patterns of a checkpoint: results of `re.match` within a time limit."""

import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qload.configs import FoundConfig, matching
from qload.configs.matching import CONFIG_SECONDS, MATCH_SECONDS, PATTERN_SECONDS, Patterns
from qload.errors import ConfigError

FOUND = FoundConfig("config.json", "quantization_config", {})
ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", "[ab]", "[^a.]", r"\d", "1", "[a-b1]", "$", "(?=a)", "(?!a)", r"\b"]
)
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}|)".format, inner),
        st.builds("(?!{})".format, inner),
        st.builds("({}){}".format, inner, REPEATS),
    ),
    max_leaves=8,
)


@given(pattern=PATTERNS, start=st.sampled_from(["", "^"]), name=st.text("ab.1", max_size=8))
def test_it_finds_what_re_finds(pattern: str, start: str, name: str) -> None:
    asked = start + pattern

    assert Patterns().match(asked, name) == (re.match(asked, name) is not None)
    assert Patterns(anywhere=True).match(asked, name) == (re.search(asked, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (r".*\.mlp\.(gate|up)_proj$", "model.layers.0.mlp.up_proj", True),
        (r".*\.mlp\.(gate|up)_proj$", "model.layers.0.mlp.up_proj.x", False),
        (r".*\.layers\.[0-3]\.", "model.layers.12.mlp", False),
        (r"model\.layers\.\d{1,2}\.self_attn", "model.layers.12.self_attn.q_proj", True),
        (r"(?!.*lm_head).*", "lm_head", False),
        (r"(?!.*lm_head).*", "model.layers.0.mlp.up_proj", True),
        (r"^(?!.*\.experts\.).*$", "model.layers.0.mlp.experts.3.up_proj", False),
        (r".*(?<!gate)_proj$", "model.layers.0.mlp.gate_proj", False),
        ("lm_head", "model.lm_head", False),
        ("", "anything", True),
    ],
)
def test_patterns_as_configs_have_them(pattern: str, name: str, found: bool) -> None:
    assert Patterns().match(pattern, name) == found


CATASTROPHES = [
    ("(a|a)*b$", "a" * 5000 + "bb"),
    ("((a+)+)+$", "a" * 5000 + "b"),
    (".*.*.*.*.*.*.*.*x$", "x" * 5000 + "y"),
    ("(a|b|ab)*c$", "ab" * 2000 + "cc"),
    (r"(a*)(b*)\1\2" * 30 + "c$", "ab" * 1000 + "cc"),
    ("(?!(a|a)*b$)a", "a" * 5000 + "bb"),
]


class Clock:
    """Clock of a busy thread: every call advances it by `step` seconds."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.mark.parametrize(("pattern", "name"), CATASTROPHES)
def test_a_pattern_that_takes_for_ever_is_an_error_of_the_names_it_is_asked_for(
    pattern: str, name: str
) -> None:
    """Python's own engine would need years for each pattern; the end of this test is half of the check."""
    patterns = Patterns(FOUND, "dynamic")

    for asked in (name, "short"):  # the second time without a match attempt
        with pytest.raises(ConfigError, match="takes too long") as caught:
            patterns.match(pattern, asked)
        assert (caught.value.file, caught.value.key) == ("config.json", "quantization_config.dynamic")
        assert asked in caught.value.got
    assert patterns.match("short", "short")


@pytest.mark.slow
def test_all_patterns_of_a_config_share_one_time() -> None:
    """A hundred patterns take as long as a few: none gets a full attempt after the config's time limit."""
    patterns = Patterns()
    told = [untold(patterns, f"(a|a)*b$|{number}", "a" * 5000 + "bb") for number in range(100)]

    assert all(told)
    assert patterns._left <= 0


def test_quick_matches_give_back_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of names is possible if each match takes the normal time."""
    monkeypatch.setattr(matching, "thread_time", Clock(MATCH_SECONDS / 4))
    patterns = Patterns()

    for number in range(round(4 * CONFIG_SECONDS / MATCH_SECONDS) // 10):
        assert not patterns.match("a", f"name{number}")
    assert patterns._left == CONFIG_SECONDS


def test_matches_that_are_all_a_little_slow_spend_a_pattern_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No match exceeds its timeout, but together they would take time in proportion to the names."""
    monkeypatch.setattr(matching, "thread_time", Clock(PATTERN_SECONDS / 64))
    patterns = Patterns()

    told = [untold(patterns, "a", f"name{number}") for number in range(100)]

    assert told[0] is None
    assert told[-1] is not None
    assert patterns.match("b", "b")  # another pattern has its own time


def untold(patterns: Patterns, pattern: str, name: str) -> ConfigError | None:
    try:
        patterns.match(pattern, name)
    except ConfigError as error:
        return error
    return None


def test_a_busy_machine_is_not_a_slow_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a match after a timeout in wall time without CPU time of this thread."""
    waits: Iterator[object] = iter([TimeoutError, TimeoutError, None])

    def match(name: str, timeout: float) -> object:
        error = next(waits)
        if error is not None:
            raise TimeoutError
        return name

    monkeypatch.setattr(matching, "compile_pattern", lambda _: SimpleNamespace(match=match, search=match))

    assert Patterns().match("x", "name")


@pytest.mark.parametrize("collects", [True, False])
def test_a_collection_of_garbage_is_not_a_slow_pattern(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection takes CPU time of this thread, at any moment."""
    clock, calls = [0.0], [0]

    def match(name: str, timeout: float) -> object:
        calls[0] += 1
        if calls[0] > 1:
            return name
        if collects:
            gc.collect()
        clock[0] += 5
        raise TimeoutError

    monkeypatch.setattr(matching, "compile_pattern", lambda _: SimpleNamespace(match=match, search=match))
    monkeypatch.setattr(matching, "thread_time", lambda: clock[0])
    patterns = Patterns()

    gc.disable()
    try:
        told = [untold(patterns, "x", "name") is None for _ in range(2)]
    finally:
        gc.enable()
    assert told == [collects, collects]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    "pattern",
    [
        "(", "a)", "[a", "*", "a**", "a{3,2}", "(?<!a+)b", "(?P<x", "[b-a]", "\\", "(?R)", r"\p{Lu}", "(?i",
        "(?:a){e}", "(?:ab){1<=e<=2}", "[[:alpha:]]", r"\m",
    ],
)  # fmt: skip
def test_what_python_does_not_read_or_reads_otherwise_says_nothing_of_any_name(pattern: str) -> None:
    with pytest.raises(ConfigError, match="cannot be judged for a"):
        Patterns().match(pattern, "a")


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("x" * 5000, id="length"),
        pytest.param("(" * 100 + ")" * 100, id="depth"),
        pytest.param("(a{1000}){1000}", id="letters"),
        pytest.param("((((){999}){999}){999}){999}", id="nothing, very often"),
    ],
)
def test_what_would_grow_without_measure_is_refused(pattern: str) -> None:
    """The library expands counts in memory: none of these patterns may reach it."""
    with pytest.raises(ConfigError, match="more than"):
        Patterns().match(pattern, "a")
