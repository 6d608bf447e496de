"""The matcher for patterns of a checkpoint: `re.match`, without its time."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qload.detect.regex import Regex
from qload.errors import PatternError

ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a.]", r"\d", "1", "[a-b1]", "$"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("(?:{}|)".format, inner),
        st.builds("({}){}".format, inner, REPEATS),
    ),
    max_leaves=8,
)


@given(pattern=PATTERNS, start=st.sampled_from(["", "^"]), name=st.text("ab.1\n", max_size=8))
def test_it_finds_what_re_match_finds(pattern: str, start: str, name: str) -> None:
    """But for `$` before a last newline, which no name has."""
    name = name.rstrip("\n")

    assert Regex(start + pattern).match(name) == (re.match(start + pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (r".*\.mlp\.(gate|up)_proj$", "model.layers.0.mlp.up_proj", True),
        (r".*\.mlp\.(gate|up)_proj$", "model.layers.0.mlp.up_proj.x", False),
        (r".*\.layers\.[0-3]\.", "model.layers.12.mlp", False),
        (r"model\.layers\.\d{1,2}\.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("lm_head", "model.lm_head", False),
        ("", "anything", True),
    ],
)
def test_patterns_as_configs_have_them(pattern: str, name: str, found: bool) -> None:
    assert Regex(pattern).match(name) == found


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("(a|a)*b", "a" * 5000),
        ("(a?){64}a{64}", "a" * 63),
        ("((a+)+)+$", "a" * 5000 + "b"),
        (".*.*.*.*.*.*.*.*x", "a" * 1000),
        ("(a|b|ab)*c", "ab" * 2000),
    ],
)
def test_patterns_that_take_others_for_ever_do_not_match_in_no_time(pattern: str, name: str) -> None:
    """With Python's own engine none of these ends within a lifetime: here this test is not slow."""
    assert not Regex(pattern).match(name)


@pytest.mark.parametrize(
    "pattern",
    [
        "(", "a)", "[a", "*", "a**", "a++", "a{3,2}", "a{,3}", "(?=a)", "(?!a)", "(?<!a)b", "(?P<x>a)",
        "(?i)a", r"(a)\1", r"\bx", r"\A", "a^b", "[b-a]", "\\",
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        Regex(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param("x" * 2000, id="length"),
        pytest.param("(" * 100 + ")" * 100, id="depth"),
        pytest.param("(a{1000}){1000}", id="letters"),
        pytest.param("((((){999}){999}){999}){999}", id="nothing, very often"),
    ],
)
def test_what_would_grow_without_measure_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="more than"):
        Regex(pattern)
