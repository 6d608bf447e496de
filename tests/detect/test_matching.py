"""Modules of a config entry, by name and pattern."""

import pytest

from qload.configs import FoundConfig
from qload.configs.matching import (
    IgnoredModules,
    Patterns,
    check_pattern_lengths,
    matcher,
    matches,
    precedence,
)
from qload.errors import ConfigError, MismatchError

pytestmark = pytest.mark.usefixtures("seen_texts")

NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        pytest.param(NAME, True, id="its name"),
        pytest.param("mlp.down_proj", True, id="its last segments"),
        pytest.param("down_proj", True, id="its last segment"),
        pytest.param("own_proj", False, id="a part of a segment"),
        pytest.param("layers.1", False, id="what it lies in"),
        pytest.param("x." + NAME, False, id="a longer name"),
        pytest.param("re:.*down_proj$", True, id="a pattern"),
        pytest.param("re:down_proj", False, id="a pattern counts from the start"),
        pytest.param("re:model", True, id="a pattern need not reach the end"),
        pytest.param("Linear", True, id="linear layers"),
        pytest.param("linear", False, id="another name"),
    ],
)
def test_an_entry_means_whole_segments_patterns_or_every_linear_layer(entry: str, meant: bool) -> None:
    assert matches(entry, NAME, Patterns()) == meant


def test_any_of_several_entries_will_do_and_none_of_none() -> None:
    assert matcher("lm_head", "down_proj", patterns=Patterns())(NAME)
    assert not matcher(patterns=Patterns())(NAME)


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    entries = ["Linear", "Embedding", "re:.*", "down_proj"]

    assert sorted(entries, key=precedence) == ["down_proj", "re:.*", "Embedding", "Linear"]


@pytest.mark.parametrize("name", ["model.embed_tokens", "transformer.wte", "embed_tokens"])
def test_an_embedding_is_told_by_its_name(name: str) -> None:
    assert matches("Embedding", name, Patterns())
    assert not matches("Embedding", f"{name}.proj", Patterns())
    assert not matches("Embedding", NAME, Patterns())


def test_a_pattern_that_is_not_read_is_named_with_its_place() -> None:
    found = FoundConfig("config.json", "quantization_config", {})
    ignored = IgnoredModules(("lm_head", "re:(x"), patterns=Patterns(found, "ignore"))

    assert ignored.entry("lm_head") == "lm_head"  # it comes first, before any pattern
    with pytest.raises(ConfigError) as caught:
        ignored.entry("up")

    assert (caught.value.file, caught.value.key) == ("config.json", "quantization_config.ignore")
    assert "'(x', which cannot be judged for up: '(x': missing )" in caught.value.got


def test_a_pattern_of_a_shell_that_is_too_long_is_named_when_it_is_read() -> None:
    found = FoundConfig("config.json", "quantization", {})

    with pytest.raises(ConfigError, match=r"quantization\.exclude_modules"):
        check_pattern_lengths(found, "exclude_modules", ["lm_head", "x" * 5000 + "*"])


def test_trap_54_an_entry_inside_of_a_fused_set_is_an_error() -> None:
    """An engine excludes qkv_proj if q, k and v are excluded; it cannot exclude only q."""
    assert IgnoredModules(("re:.*[qkv]_proj",)).entry("attn.qkv_proj") == "re:.*[qkv]_proj"
    assert IgnoredModules(("o_proj",)).entry("attn.qkv_proj") is None
    with pytest.raises(MismatchError, match=r"attn\.q_proj left out, attn\.k_proj not"):
        IgnoredModules(("q_proj",)).entry("attn.qkv_proj")


def test_ignored_modules_are_equal_and_shown_by_their_entries_alone() -> None:
    one, other = (IgnoredModules(("lm_head",), "ignore", patterns=Patterns()) for _ in range(2))

    assert one == other
    assert repr(one).startswith("IgnoredModules(names=('lm_head',), key='ignore', fused=(")
    assert "Patterns" not in repr(one)
    assert one != IgnoredModules(("lm_head",), "exclude")
