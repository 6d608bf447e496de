"""`modules_to_not_convert`: whole names and whole segments, and fused layers whose parts agree."""

import pytest
from torch import nn

from qload.configs.matching import GlobExclusions, IgnoredModules
from qload.errors import ArgumentError, MismatchError
from qload.loader.exclusion import Exclusions, stacks
from qload.methods import AWQMarlinConfig, AWQMarlinLinearMethod, UnquantizedLinearMethod

pytestmark = pytest.mark.usefixtures("seen_texts")


def method(prefix: str, *names: str) -> type[object]:
    config = AWQMarlinConfig(4, 128, True, list(names))
    return type(config.get_quant_method(nn.Linear(8, 8), prefix))


@pytest.mark.parametrize(
    ("name", "prefix", "excluded"),
    [
        pytest.param("lm_head", "lm_head", True, id="the exact name"),
        pytest.param("model.layers.1", "model.layers.1.mlp.up_proj", True, id="all of a block"),
        pytest.param("visual", "model.visual.blocks.0.attn.proj", True, id="a segment in the middle"),
        pytest.param("mlp.gate", "model.layers.0.mlp.gate", True, id="the last segments"),
        pytest.param("mlp.gate", "model.layers.0.mlp.gate_proj", False, id="a segment's beginning"),
        pytest.param("layers.1", "model.layers.10.mlp.up_proj", False, id="a number's first digit"),
        pytest.param("proj", "model.layers.0.mlp.up_proj", False, id="a segment's end"),
        pytest.param("language_model.layers.0", "layers.0", True, id="more in front of the name"),
        pytest.param("model.layers.0.mlp", "layers.0", False, id="more behind the name"),
        pytest.param("mlp.up_proj", "mlp.experts.up_proj", False, id="segments apart"),
        pytest.param("mlp.gate.", "layers.0.mlp.gate", True, id="a dot behind"),
        pytest.param("mlp.gate.", "layers.0.mlp.gate_proj", False, id="a dot behind a segment's beginning"),
        pytest.param(".mlp.gate", "layers.0.mlp.gate", True, id="a dot in front"),
    ],
)
def test_an_entry_excludes_layers_by_whole_segments(name: str, prefix: str, excluded: bool) -> None:
    assert method(prefix, name) is (UnquantizedLinearMethod if excluded else AWQMarlinLinearMethod)


@pytest.mark.parametrize("name", [".", "mlp..gate", "...", "..a..b"])
def test_an_entry_with_an_empty_segment_is_refused(name: str) -> None:
    with pytest.raises(
        ArgumentError, match="modules_to_not_convert\n  expected dotted names without an empty"
    ):
        method("layers.0.mlp.gate", name)


@pytest.mark.parametrize(
    ("names", "excluded"),
    [
        pytest.param(["q_proj", "k_proj", "v_proj"], True, id="all parts"),
        pytest.param(["self_attn"], True, id="what holds them"),
        pytest.param(["qkv_proj"], True, id="the fused name"),
        pytest.param(["layers.1.self_attn.q_proj"], False, id="another block's part"),
    ],
)
def test_a_fused_layer_is_excluded_with_all_its_parts(names: list[str], excluded: bool) -> None:
    found = method("layers.0.self_attn.qkv_proj", *names)

    assert found is (UnquantizedLinearMethod if excluded else AWQMarlinLinearMethod)


@pytest.mark.parametrize(
    ("fused", "entry", "kept"),
    [
        pytest.param("qkv_proj", "k_proj", "q_proj", id="qkv"),
        pytest.param("gate_up_proj", "gate_proj", "up_proj", id="gate and up"),
    ],
)
def test_parts_that_disagree_are_both_named(fused: str, entry: str, kept: str) -> None:
    with pytest.raises(MismatchError, match=rf"a\.{fused}: [^$]*a\.{entry} left out, a\.{kept} not"):
        method(f"a.{fused}", f"a.{entry}")


@pytest.mark.parametrize("layer", [nn.Embedding(4, 4), nn.LayerNorm(4), nn.Module()], ids=repr)
def test_a_layer_that_is_not_linear_has_no_method(layer: nn.Module) -> None:
    assert AWQMarlinConfig(4, 128, True).get_quant_method(layer, "a") is None


def test_an_engines_own_layer_is_linear_if_it_has_inputs_and_outputs() -> None:
    layer = nn.Module()
    layer.input_size, layer.output_size = 8, 8  # type: ignore[assignment]

    assert isinstance(AWQMarlinConfig(4, 128, True).get_quant_method(layer, "a"), AWQMarlinLinearMethod)


@pytest.mark.parametrize(
    "exclusions", [GlobExclusions(("*v_proj", "*up_proj")), IgnoredModules(("re:.*v_proj$", "re:.*up_proj"))]
)
def test_a_pattern_of_one_part_leaves_its_siblings(exclusions: Exclusions) -> None:
    excluded = {name for name in ("q", "k", "v", "gate", "up") if exclusions.entry(f"a.{name}_proj")}

    assert excluded == {"v", "up"}
    for fused in ("qkv_proj", "gate_up_proj"):
        with pytest.raises(MismatchError, match="not all quantized or all left out"):
            exclusions.entry(f"a.{fused}")


@pytest.mark.parametrize("exclusions", [GlobExclusions(("*.qkv*",)), GlobExclusions(("a.*",))])
def test_a_pattern_of_a_fused_layer_or_of_all_parts_holds_for_each(exclusions: Exclusions) -> None:
    assert all(exclusions.entry(f"a.{name}_proj") for name in ("q", "k", "v", "qkv"))


@pytest.mark.parametrize("names", ["lm_head", [""]], ids=["a string", "an empty name"])
def test_names_that_would_exclude_by_accident_are_refused(names: object) -> None:
    with pytest.raises(ValueError, match="a list of names"):
        AWQMarlinConfig(4, 128, True, names)  # type: ignore[arg-type]


@pytest.mark.parametrize("exclusions", [IgnoredModules(("re:mlp..gate",)), GlobExclusions(("mlp..*",))])
def test_a_pattern_may_have_dots_beside_each_other(exclusions: Exclusions) -> None:
    assert exclusions.entry("mlp..gate") == exclusions.names[0]


@pytest.mark.parametrize("kind", [Exclusions, IgnoredModules, GlobExclusions])
def test_a_name_in_a_list_with_patterns_has_no_empty_segment(kind: type[Exclusions]) -> None:
    with pytest.raises(ArgumentError, match=r"without an empty segment\n  got      'mlp\.\.gate'"):
        kind(("re:a*", "mlp..gate"))


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        ("a.experts.0.down_proj", ["a.experts.down_proj", "a.experts.output_linear"]),
        ("experts.12.w1", ["experts.w1", "experts.w13"]),
        ("a.experts.0.other", ["a.experts.other"]),
        ("a.experts.shared.down_proj", []),
        ("0.down_proj", []),
        ("down_proj", []),
    ],
)
def test_a_layer_of_an_expert_may_lie_in_matrices_of_these_names(name: str, matrices: list[str]) -> None:
    assert stacks(name) == matrices
