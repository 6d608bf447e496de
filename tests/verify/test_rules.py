"""Cases with and without a finding, for each rule."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload.checkpoint import open_checkpoint
from qload.errors import StorageError
from qload.errors.rules import rule_texts
from qload.verify import Finding, inspect, verify
from qload.verify.report import finding_of, new_finding
from tests.kernels.mp_layers import Case
from tests.paths import FIXTURES, cases
from tests.verify.checkpoints import GPTQ, gptq, model, plain, rules

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_tensors_without_a_prefix_are_a_layer(tmp_path: Path) -> None:
    assert verify(model(tmp_path, gptq(), quantization_config=GPTQ)).findings == ()
    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights("").shape == (8, 16)


def test_a_parameter_that_is_called_scales_is_no_layer(tmp_path: Path) -> None:
    tensors = {"block.scales": torch.tensor([-1.0, 2.0]), **plain("block.weight")}

    assert verify(model(tmp_path, tensors)).verdict == "ok"


def test_stages_of_a_vision_tower_may_differ(tmp_path: Path) -> None:
    tensors = plain(
        "vision.layers.0.norm.weight", "vision.layers.0.down.weight", "vision.layers.1.norm.weight"
    )

    assert verify(model(tmp_path, tensors)).verdict == "ok"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            ["layers.0.mlp.gate", "layers.0.mlp.experts.0", "layers.1.mlp.up"], id="dense, then experts"
        ),
        pytest.param(["layers.0.attn.q", "layers.1.mamba.x", "layers.2.attn.q"], id="two kinds"),
        pytest.param(
            [f"layers.{i}.{part}" for i in range(6) for part in ("mlp", "attn")[: 1 + i % 2]],
            id="several without attention",
        ),
    ],
)
def test_layers_of_a_hybrid_model_may_differ(names: list[str], tmp_path: Path) -> None:
    tensors = plain(*(f"model.{name}.weight" for name in names))

    assert verify(model(tmp_path, tensors)).findings == ()


def test_a_lost_expert_is_found(tmp_path: Path) -> None:
    tensors = plain(*(f"model.layers.{i}.mlp.experts.{e}.up.weight" for i in range(3) for e in range(4)))
    del tensors["model.layers.1.mlp.experts.2.up.weight"]

    (finding,) = verify(model(tmp_path, tensors)).findings

    assert finding.rule == "missing-sibling"
    assert finding.message == (
        "model.layers.1.mlp.experts.2.up.weight: missing, and 2 of its 2 siblings have it, "
        "such as model.layers.0.mlp.experts.2.up.weight"
    )


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_layers_that_the_config_counts_have_to_be_there(place: str, tmp_path: Path) -> None:
    count = {"num_hidden_layers": 3}
    config = count if place == "top" else {"text_config": count}

    report = verify(model(tmp_path, plain("model.layers.0.a.weight", "model.layers.2.a.weight"), **config))

    assert [finding.rule for finding in report.findings] == ["layer-count"]
    assert report.findings[0].message.endswith("1 of these layers have no tensor: 1")


def test_the_longest_list_of_an_unknown_model_has_its_layers(tmp_path: Path) -> None:
    counts = {"layers": 1, "model.layers": 3, "transformer.h": 2}
    names = [f"{block}.{at}.weight" for block, count in counts.items() for at in range(count)]

    (finding,) = verify(model(tmp_path, plain(*names), num_hidden_layers=4)).findings

    assert (finding.rule, finding.tensor) == ("layer-count", "model.layers.3")


def test_a_model_of_layers_without_any_layer_is_found(tmp_path: Path) -> None:
    tensors = plain("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

    (finding,) = verify(model(tmp_path, tensors, num_hidden_layers=32)).findings

    assert finding.rule == "layer-count"
    assert finding.message == (
        "config.json: num_hidden_layers is 32, and no tensor's name has a number of a layer"
    )


def test_layers_by_names_that_are_not_known_are_not_missed(tmp_path: Path) -> None:
    tensors = plain("bert.encoder.layer.0.output.weight", "bert.encoder.layer.1.output.weight")

    assert verify(model(tmp_path, tensors, num_hidden_layers=2)).findings == ()


def test_more_layers_than_the_config_counts_are_lawful(tmp_path: Path) -> None:
    tensors = plain(*(f"model.layers.{i}.a.weight" for i in range(3)))

    assert verify(model(tmp_path, tensors, num_hidden_layers=2)).verdict == "ok"


@pytest.mark.parametrize("name", ["nowhere", "nowhere/model.safetensors"])
def test_a_path_that_is_not_there_is_unreadable_whatever_lies_beside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")

    assert verify(tmp_path / name).verdict == inspect(tmp_path / name).verdict == "unreadable"
    assert rules(verify(tmp_path / name)) == {"no-files"}
    with pytest.raises(StorageError):
        open_checkpoint(tmp_path / name)


def test_the_report_as_json_has_its_schema(tmp_path: Path) -> None:
    folder = model(tmp_path, gptq("a", zero=8), quantization_config=GPTQ)

    report = json.loads(json.dumps(verify(folder).to_json()))

    assert (report["schema"], report["verdict"]) == (2, "findings")
    told = {"schema", "path", "verdict", "findings", "notes", "claims", "coverage", "layers"}
    assert set(report) == told
    assert set(report["findings"][0]) == {
        "rule", "severity", "tensor", "file", "message", "remedy", "cause",
    }  # fmt: skip
    assert report["findings"][0]["rule"] == "symmetry"
    assert (report["layers"][0]["bits"], report["layers"][0]["group_size"]) == (4, 8)


@pytest.mark.parametrize("rule", rule_texts())
def test_every_rule_has_a_remedy_in_plain_text(rule: str) -> None:
    remedy = new_finding(rule_texts()[rule], "a.w", None, "a.w: wrong").remedy

    assert remedy
    assert remedy == remedy.strip()
    assert not {*"`[]"} & {*remedy}
    assert remedy[0].islower() or not remedy[0].isalpha()


def test_a_remedy_of_its_own_stays() -> None:
    assert new_finding(rule_texts()["hole"], None, None, "a", "mend it").remedy == "mend it"
    assert finding_of(StorageError("f", "hole", "a", remedy="mend it")).remedy == "mend it"


@pytest.mark.parametrize("rule", rule_texts())
def test_an_error_without_a_remedy_has_that_of_its_page(rule: str) -> None:
    assert finding_of(StorageError("f", rule, "a")).remedy == rule_texts()[rule].remedy
    assert finding_of(StorageError("f", "a rule without a page", "a")).remedy == ""


def mutilate(file: Path, chance: random.Random) -> None:
    """Change, remove or add a few bytes of a file, mostly in the header at its start."""
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 5])):
        at = chance.randrange(min(len(data), 1500) if chance.random() < 0.7 else len(data))
        kind = chance.randrange(3)
        if kind == 0:
            data[at] = chance.randrange(256)
        else:
            data[at : at + (kind == 1)] = chance.choice([b"", b"0", b"-1", b'"', b"null", b"1e9", b"[]"])
    file.write_bytes(data)


def test_whatever_the_bytes_nothing_is_raised(tmp_path: Path) -> None:
    chance = random.Random(0)
    folders = cases("gptq", "awq", "refused")
    for number in range(60):
        source, broken = chance.choice(folders), tmp_path / str(number)
        shutil.copytree(source, broken, ignore=shutil.ignore_patterns("expected"))
        mutilate(chance.choice([f for f in sorted(broken.iterdir()) if f.suffix != ".toml"]), chance)

        reports = [inspect(broken), verify(broken, tp=2), verify(broken, against=source)]

        assert all(finding.message and finding.remedy for report in reports for finding in report.findings)
        assert all((report.verdict == "ok") == (not report.findings) for report in reports)


@pytest.mark.parametrize(
    ("negative", "found"),
    [
        pytest.param(0, set(), id="none"),
        pytest.param(1, {"scale-value"}, id="one"),
        pytest.param(11, {"scale-value"}, id="less than one of sixteen"),
        pytest.param(12, set(), id="one of sixteen, as no accident leaves them"),
        pytest.param(96, set(), id="half of them, as AutoRound writes them"),
        pytest.param(192, set(), id="all"),
    ],
)
def test_a_few_negative_scales_are_an_accident_and_many_are_meant(
    negative: int, found: set[str], tmp_path: Path
) -> None:
    folder = FIXTURES / "auto_round" / "auto_gptq_w4_g32_sym"
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".scales"))
    scales = tensors[name].abs().flatten()
    scales[:negative] *= -1
    tensors[name] = scales.reshape(tensors[name].shape)
    shutil.copy(folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")

    assert scales.numel() == 192
    assert rules(verify(tmp_path)) == found


def test_bits_that_some_layers_have_are_not_denied_by_others(tmp_path: Path) -> None:
    """For layers of 4 and 8 bits, the config may have either number, and no third one."""
    layers = {"a": Case(bits=4, group=32, K=128), "b": Case(bits=8, group=32, K=128)}
    tensors = {f"{p}.{name}": t for p, case in layers.items() for name, t in case.weight().fields().items()}
    for bits, found in ((4, set()), (8, set()), (2, {"claimed-method"})):
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq_v2"}

        assert rules(verify(model(tmp_path, tensors, quantization_config=config))) == found


def test_a_layer_without_an_index_is_judged_by_the_groups_of_its_config(tmp_path: Path) -> None:
    """Zero points outside the middle of a symmetric layer, and zero points with two interpretations."""
    tensors = Case(bits=4, group=32, K=128).weight().fields()
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    stored = {f"a.{name}": tensor for name, tensor in tensors.items() if name != "g_idx"}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}

    report = verify(model(tmp_path, stored, quantization_config={**config, "sym": True}))

    assert rules(report) == {"symmetry"}
    total = 4 * tensors["scales"].shape[1]
    assert f"{total} of {total}" in report.findings[0].message
    asymmetric = verify(model(tmp_path, stored, quantization_config={**config, "sym": False}))
    assert rules(asymmetric) == {"zero-point-reading"}


def test_a_wrong_shape_is_told_with_what_the_other_shapes_say(tmp_path: Path) -> None:
    tensors = {**gptq("a"), "a.qzeros": torch.zeros(3, 1, dtype=torch.int32)}

    (finding,) = verify(model(tmp_path, tensors, quantization_config=GPTQ)).findings

    said = "the shapes say 4 bits and 2 groups of 8 rows, config.json claims 4 bits and a group size of 8"
    assert finding.message.splitlines()[-1] == said


def test_zero_points_of_a_symmetric_layer_are_all_looked_at(tmp_path: Path) -> None:
    N, groups = 1 << 16, 16  # more words of zero points than one run of rows
    qzeros = torch.full((groups, N // 8), 0x77777777, dtype=torch.int32)
    qzeros[-1, 0] = 0x77777776
    tensors = {
        "a.qweight": torch.randint(-(2**31), 2**31, (groups, N), dtype=torch.int32),
        "a.qzeros": qzeros,
        "a.scales": torch.rand(groups, N).half() + 1,
        "a.g_idx": torch.arange(8 * groups, dtype=torch.int32) // 8,
    }

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ))

    (told,) = [finding.message for finding in report.findings if finding.rule == "symmetry"]
    assert told.startswith(
        "a.qzeros: zero point 7 at group 15, column 0, a symmetric layer of 4 bits has 8; 1 of "
    )


def test_a_block_of_a_plain_matrix_that_is_there_twice_is_told(tmp_path: Path) -> None:
    matrix = torch.randn(64, 64)
    matrix[32:40] = matrix[:8]

    report = verify(model(tmp_path, {"model.layers.0.mlp.up_proj.weight": matrix}))

    assert [finding.rule for finding in report.findings] == ["repeated-block"]


def test_of_values_that_are_no_numbers_the_first_place_is_said_and_how_many(tmp_path: Path) -> None:
    weight = torch.ones(3, 1 << 16)  # a run of rows each
    weight[1, 5], weight[2, 7] = torch.inf, torch.nan

    (finding,) = verify(model(tmp_path, {"a.weight": weight})).findings

    assert finding.message == "a.weight: inf at (1, 5); 2 in all"


def test_a_count_of_layers_that_is_below_zero_says_nothing(tmp_path: Path) -> None:
    assert verify(model(tmp_path, plain("a.weight"), num_hidden_layers=-1)).findings == ()


@pytest.mark.parametrize(("least", "more"), [(0.2, 0.2), (1.0, 0.2)])
def test_values_of_nearly_one_size_are_what_the_header_says(
    least: float, more: float, tmp_path: Path
) -> None:
    random = torch.Generator().manual_seed(0)
    sizes = least + more * torch.rand(64, 64, generator=random)
    values = torch.randn(64, 64, generator=random).sign() * sizes

    assert verify(model(tmp_path, {"a.weight": values.half()})).findings == ()


def test_of_a_type_that_is_not_known_norms_of_zeros_may_be_meant(tmp_path: Path) -> None:
    norms = {f"model.layers.{layer}.input_layernorm.weight": torch.zeros(64) for layer in range(2)}

    assert verify(model(tmp_path, norms, model_type="stranger")).findings == ()


def test_a_finding_without_a_remedy_has_that_of_its_page() -> None:
    finding = Finding("hole", "error", "up.weight", None, "up.weight: 3 of 9 bytes")

    assert finding.remedy == rule_texts()["hole"].remedy != ""
    assert (
        Finding("hole", "error", "up.weight", None, "up.weight: 3 of 9 bytes", "fetch it").remedy
        == "fetch it"
    )
    assert Finding("a rule of its own", "error", None, None, "wrong").remedy == ""
