"""What an entry of the config claims about its modules is checked as what the base claims."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import inspect, verify
from tests.formats.test_gptq_zeros import fields, packed
from tests.verify.checkpoints import model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

K, N, GROUP = 256, 64, 64
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
BASE = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": GROUP,
    "sym": True,
    "data_type": "int",
}


def layer(
    name: str,
    *,
    bits: int = 4,
    sym: bool = True,
    order: Tensor | None = None,
    group: int = GROUP,
    off: int = 0,
) -> dict[str, Tensor]:
    """A layer of drawn floats; `off`: what is added to one zero point."""
    make = torch.Generator().manual_seed(len(name))
    floats = torch.randn(K // group, group, N, generator=make, dtype=torch.float64)
    top = 2**bits - 1
    if sym:
        scales = (floats.abs().amax(1) * 2 / top).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((floats.amax(1) - floats.amin(1)) / top).half()
        zeros = (-floats.amin(1) / scales.double()).round().long()
    codes = ((floats / scales.double()[:, None]).round() + zeros[:, None]).long().clamp(0, top).reshape(K, N)
    zeros[1, 5] += off
    rows = torch.arange(K) if order is None else order
    return {
        f"{name}.qweight": packed(codes[rows].T.contiguous(), bits).T.contiguous(),
        f"{name}.qzeros": fields(zeros, bits),
        f"{name}.scales": scales,
        f"{name}.g_idx": (torch.arange(K) // group)[rows].int(),
    }


SHUFFLED = torch.randperm(K, generator=torch.Generator().manual_seed(1))
SOUND = [
    pytest.param({"sym": False}, {}, {"sym": False}, id="an asymmetric layer"),
    pytest.param({"desc_act": True}, {}, {"order": SHUFFLED}, id="a layer in act order"),
    pytest.param({"desc_act": False}, {"desc_act": True}, {}, id="a layer in order"),
    pytest.param({"bits": 8, "sym": False}, {}, {"bits": 8, "sym": False}, id="other bits"),
    pytest.param({"group_size": 32}, {}, {"group": 32}, id="another group size"),
]
LIES = [
    pytest.param({"sym": True}, {"sym": False}, {"off": -1}, "symmetry", "sym is true in dynamic", id="sym"),
    pytest.param(
        {"desc_act": False},
        {"desc_act": True},
        {"order": SHUFFLED},
        "act-order",
        "desc_act is false in dynamic",
        id="desc_act",
    ),
    pytest.param({"bits": 8}, {}, {}, "claimed-method", "bits is 8 in dynamic", id="bits"),
    pytest.param(
        {"group_size": 32}, {}, {}, "tensor-shape", "a group size of 32 in dynamic", id="group size"
    ),
]


@pytest.mark.parametrize(("rule", "base", "down"), SOUND)
def test_a_layer_that_is_as_its_rule_says_is_sound(
    rule: dict[str, Any], base: dict[str, Any], down: dict[str, Any], tmp_path: Path
) -> None:
    up: dict[str, Any] = {"order": SHUFFLED} if base.get("desc_act") else {}
    tensors = {**layer(UP, **up), **layer(DOWN, **down)}
    config = {**BASE, **base, "dynamic": {r"+:.*\.down_proj": rule}}

    report = verify(model(tmp_path, tensors, quantization_config=config))

    assert (report.verdict, report.findings) == ("ok", ())
    without = model(tmp_path, tensors, quantization_config={**BASE, **base})
    assert verify(without).verdict == "findings" or base or rule.get("bits")  # the base denies this layer


@pytest.mark.parametrize(("rule", "base", "down", "found", "text"), LIES)
def test_a_rule_that_a_layer_denies_is_a_finding(
    rule: dict[str, Any], base: dict[str, Any], down: dict[str, Any], found: str, text: str, tmp_path: Path
) -> None:
    up = {"order": SHUFFLED} if base.get("desc_act") else {"sym": base.get("sym", True)}
    tensors = {**layer(UP, **up), **layer(DOWN, **down)}
    config = {**BASE, **base, "dynamic": {r"+:.*\.down_proj": rule}}

    (finding,) = verify(model(tmp_path, tensors, quantization_config=config)).findings

    assert finding.rule == found
    assert text in finding.message
    assert UP not in finding.message


@pytest.mark.parametrize("key", [DOWN, ".*down_proj"])
def test_entries_of_auto_round_are_checked(key: str, tmp_path: Path) -> None:
    config = {**ROUND, "extra_config": {key: {"sym": False}}}
    mixed = {**layer(UP), **layer(DOWN, sym=False)}
    assert verify(model(tmp_path, mixed, quantization_config=config)).verdict == "ok"
    assert rules(verify(model(tmp_path, mixed, quantization_config=ROUND))) == {"symmetry"}

    lie = {**ROUND, "sym": False, "extra_config": {key: {"sym": True}}}
    (finding,) = verify(
        model(tmp_path, {**layer(UP, sym=False), **layer(DOWN, off=1)}, quantization_config=lie)
    ).findings
    assert (finding.rule, finding.tensor) == ("symmetry", f"{DOWN}.qzeros")
    assert f"sym is true in extra_config.{key}" in finding.message


@pytest.mark.parametrize("lies", [False, True])
def test_the_order_that_a_group_of_compressed_tensors_denies_is_found(lies: bool, tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(0))
    tensors = {
        f"{DOWN}.weight_packed": packed(codes, 4),
        f"{DOWN}.weight_scale": torch.rand(N, K // GROUP).bfloat16() + 0.5,
        f"{DOWN}.weight_shape": torch.tensor([N, K]),
        f"{DOWN}.weight_g_idx": (torch.arange(K) // GROUP)[SHUFFLED].int(),
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": {**weights, "actorder": None if lies else "group"}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": group},
    }

    found = rules(verify(model(tmp_path, tensors, quantization_config=config)))

    assert found == ({"act-order"} if lies else set())


def test_inspect_has_the_claims_of_each_layer(tmp_path: Path) -> None:
    config = {**BASE, "dynamic": {r"+:.*\.down_proj": {"sym": False, "bits": 8}}}
    tensors = {**layer(UP), **layer(DOWN, bits=8, sym=False)}

    found = {
        info.prefix: info.claims
        for info in inspect(model(tmp_path, tensors, quantization_config=config)).layers
    }

    assert [(found[name].bits, found[name].sym) for name in (UP, DOWN)] == [(4, True), (8, False)]  # type: ignore[union-attr]


def pack_quantized(name: str, *, zero_points: bool) -> dict[str, Tensor]:
    """A layer as compressed-tensors packs it, asymmetric with zero points."""
    make = torch.Generator().manual_seed(sum(map(ord, name)))
    codes = torch.randn(N, K, generator=make).mul(2.5).round().long().add(8).clamp(0, 15)
    own = {
        f"{name}.weight_packed": packed(codes, 4),
        f"{name}.weight_scale": torch.rand(N, K // GROUP, generator=make).add(0.5).bfloat16(),
        f"{name}.weight_shape": torch.tensor([N, K]),
    }
    zeros = packed(torch.full((K // GROUP, N), 8), 4).T.contiguous()
    return own | ({f"{name}.weight_zero_point": zeros} if zero_points else {})


@pytest.mark.parametrize("claimed", [True, False])
def test_a_layer_whose_group_is_symmetric_has_no_zero_points_to_miss(claimed: bool, tmp_path: Path) -> None:
    names = [UP.replace("layers.0", f"layers.{at}") for at in range(3)]
    stored = {
        name: tensor
        for at, own in enumerate(names)
        for name, tensor in pack_quantized(own, zero_points=at > 0).items()
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    first, rest = r"re:.*layers\.0\..*", r"re:.*layers\.[12]\..*"
    groups = {
        "group_0": {"targets": [first], "weights": {**weights, "symmetric": claimed}},
        "group_1": {"targets": [rest], "weights": {**weights, "symmetric": False}},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
    }

    found = rules(verify(model(tmp_path, stored, quantization_config=config)))

    assert found == (set() if claimed else {"missing-tensor", "missing-sibling"})


def test_bits_that_one_layer_denies_are_told_with_the_way_out(tmp_path: Path) -> None:
    stored = {**layer(UP), **layer(DOWN, bits=8)}

    report = verify(model(tmp_path, stored, quantization_config=BASE))

    assert report.verdict == "ok"
    (note,) = [note for note in report.notes if "bits" in note]
    assert note.startswith(
        f"{DOWN}: 8 bits by its shapes, which are believed, and config.json says bits is 4"
    )
    assert "1 of 2 layers" in note


@pytest.mark.parametrize(
    ("entry", "found"), [({"desc_act": False}, set()), ({"group_size": GROUP}, {"group-order"})]
)
def test_only_of_modules_that_are_claimed_to_be_in_act_order_an_order_was_lost(
    entry: dict[str, Any], found: set[str], tmp_path: Path
) -> None:
    """Codes that do not fill the range of any group, as where rows were quantized in other groups."""
    make = torch.Generator().manual_seed(0)
    codes = torch.randn(256, K, generator=make).mul(2.2).round().long().add(8).clamp(0, 15)
    stored = {
        f"{UP}.qweight": packed(codes, 4).T.contiguous(),
        f"{UP}.qzeros": fields(torch.full((K // GROUP, 256), 8), 4),
        f"{UP}.scales": torch.rand(K // GROUP, 256, generator=make).add(0.5).half(),
        f"{UP}.g_idx": (torch.arange(K) // GROUP).int(),
    }
    config = {**BASE, "desc_act": True, "dynamic": {r"+:.*up_proj": entry}}

    assert rules(verify(model(tmp_path, stored, quantization_config=config))) == found
