"""How programs wrap zero points of 0, stored minus one: the evidence decides, by arithmetic of torch."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.detect import loader_from_config
from qload.errors import MismatchError
from qload.layouts import StoredMinusOne, StoredMinusOnePerField
from qload.parallel import FakeWorld
from qload.spec import zero_point_evidence
from qload.spec.weight import has_middle_zeros
from qload.storage import MemoryStorage
from qload.verify import verify
from qload.weights import Weights
from tests.experts.expert_layers import FACTS
from tests.verify.checkpoints import model, rules

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

NAME = "model.layers.0.mlp.up_proj"


def signed(words: Tensor) -> Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def packed(fields: Tensor, bits: int) -> Tensor:
    """(R, n) of unsigned fields, the first in the low bits -> (R, n * bits / 32)."""
    rows = fields.shape[0]
    ones = (fields[..., None] >> torch.arange(bits)) & 1
    return signed((ones.reshape(rows, -1, 32) << torch.arange(32)).sum(-1))


def whole_words(zeros: Tensor, bits: int) -> Tensor:
    """1 is taken from every field of a word at once: what is borrowed comes from the next field."""
    if bits == 3:  # no program does this: fields lie in two words
        return fields(zeros, bits)
    ones = sum(1 << at for at in range(0, 32, bits))
    return signed((packed(zeros, bits).long() - ones) % 2**32)


def fields(zeros: Tensor, bits: int) -> Tensor:
    """1 is taken from each field, which wraps."""
    return packed((zeros - 1) % 2**bits, bits)


def ones(zeros: Tensor, bits: int) -> Tensor:
    """-1 of 32 bits is shifted to its field and OR-ed into the word; 3 bits: of fields within one word."""
    words = packed((zeros - 1) % 2**bits, bits).long() % 2**32
    for n in range(zeros.shape[1]):
        run, place = divmod(n * bits, 32)
        if place + bits <= 32:
            words[:, run] |= torch.where(zeros[:, n] == 0, (0xFFFFFFFF << place) % 2**32, 0)
    return signed(words)


def drawn(K: int, N: int, group: int, share: float, seed: int = 0) -> Tensor:
    """(G, group, N): weights about 0, of which a `share` of the groups has none below."""
    make = torch.Generator().manual_seed(seed)
    weights = torch.randn(K // group, group, N, generator=make, dtype=torch.float64)
    above = torch.rand(K // group, 1, N, generator=make) < share
    return torch.where(above, weights.abs(), weights)


def quantized(
    bits: int, K: int, N: int, group: int, share: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (K, N), zero points and scales (G, N), their meaning (N, K); a `share` of groups is above 0."""
    weights = drawn(K, N, group, share, seed)
    low, high = weights.amin(1).clamp(max=0), weights.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.double()).round().long().clamp(0, 2**bits - 1)
    codes = ((weights / scales.double()[:, None]).round() + zeros[:, None]).long().clamp(0, 2**bits - 1)
    means = ((codes - zeros[:, None]).double() * scales.double()[:, None]).reshape(K, N).T
    return codes.reshape(K, N), zeros, scales, means.half().contiguous()


def original(K: int, N: int, group: int, share: float, seed: int = 0) -> Tensor:
    """The floats (N, K) that `quantized` quantizes."""
    return drawn(K, N, group, share, seed).reshape(K, N).T.float().contiguous()


def tensors(
    codes: Tensor, scales: Tensor, qzeros: Tensor, bits: int, order: Tensor | None = None
) -> dict[str, Tensor]:
    K = codes.shape[0]
    g_idx = torch.arange(K) // (K // scales.shape[0])
    rows = torch.arange(K) if order is None else order
    return {
        f"{NAME}.qweight": packed(codes[rows].T.contiguous(), bits).T.contiguous(),
        f"{NAME}.qzeros": qzeros,
        f"{NAME}.scales": scales,
        f"{NAME}.g_idx": g_idx[rows].int(),
    }


def config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": False,
        **more,
    }


def loaded(stored: dict[str, Tensor], claims: dict[str, Any], **more: Any) -> Weights:
    return Weights(MemoryStorage(stored), loader=loader_from_config(claims), **more)


READINGS = {whole_words: StoredMinusOne(), fields: StoredMinusOnePerField()}
SIZES = pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 64), (4, 64)])
WRITERS = pytest.mark.parametrize("write", [whole_words, fields])


@SIZES
@WRITERS
def test_the_reading_that_puts_zero_points_amid_codes_is_taken(bits: int, group: int, write: Any) -> None:
    codes, zeros, scales, want = quantized(bits, 512, 256, group, 0.1)
    stored = tensors(codes, scales, write(zeros, bits), bits)

    weight = loaded(stored, config(bits, group)).get_weights(NAME)

    assert int((zeros == 0).sum()) > 50
    assert torch.equal(weight.dequantize().half(), want)
    expected = StoredMinusOne() if bits == 3 else READINGS[write]  # of 3 bits there is one reading
    assert weight.config.zeros == expected


@WRITERS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cut", ["get_weights_col", "get_weights_row"])
def test_every_rank_takes_the_same_reading(write: Any, ranks: int, cut: str) -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0.1)
    stored = tensors(codes, scales, write(zeros, 4), 4)

    shares = [
        getattr(loaded(stored, config(4, 64), process_group=one), cut)(NAME) for one in FakeWorld(ranks)
    ]

    assert {share.config.zeros for share in shares} == {READINGS[write]}
    joined = torch.cat([share.dequantize().half() for share in shares], int(cut == "get_weights_row"))
    assert torch.equal(joined, want)


@WRITERS
def test_rows_in_act_order_are_counted_in_their_groups(write: Any) -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0.1)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(5))
    stored = tensors(codes, scales, write(zeros, 4), 4, order)

    weight = loaded(stored, config(4, 64, desc_act=True)).get_weights(NAME)

    assert torch.equal(weight.dequantize().half(), want[:, order])


@WRITERS
def test_what_is_verified_ok_is_loaded_converted_and_repacked_alike(write: Any, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from qload.cli import main

    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0.1)
    for name in ("from", "to"):
        (tmp_path / name).mkdir()
    source = model(
        tmp_path / "from",
        tensors(codes, scales, write(zeros, 4), 4),
        quantization_config=config(4, 64),
    )

    assert verify(source).verdict == "ok"
    done = CliRunner().invoke(
        main, ["convert", str(source), "-o", str(tmp_path / "to" / "awq"), "--to", "awq"]
    )
    assert done.exit_code == 0, done.output
    asked: list[tuple[Path, Any]] = [
        (source, None),
        (source, "marlin"),
        (source, "exllama"),
        (tmp_path / "to" / "awq", None),
    ]
    for path, target in asked:
        with open_checkpoint(path, target=target) as weights:
            assert torch.equal(weights.get_weights(NAME).dequantize().half(), want), (path, target)


@WRITERS
def test_two_zero_points_of_0_are_a_doubt_that_a_reference_settles(
    write: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 128, 0.002)
    folders = [tmp_path / name for name in ("file", "floats", "codes")]
    for folder in folders:
        folder.mkdir()
    stored = tensors(codes, scales, write(zeros, 4), 4)
    source = model(folders[0], stored, quantization_config=config(4, 128))
    model(folders[1], {f"{NAME}.weight": original(512, 256, 128, 0.002)})
    model(folders[2], {f"{NAME}.weight": want})

    (finding,) = verify(source).findings
    assert (finding.rule, finding.severity, finding.tensor) == (
        "zero-point-reading",
        "warning",
        f"{NAME}.qzeros",
    )
    assert "2 of 1024 zero points have two readings" in finding.message
    for reference in folders[1:]:
        report = verify(source, against=reference)
        if write is whole_words:  # the reading that is taken
            assert report.verdict == "ok"
        else:
            assert "zero points minus one in each field by itself" in report.findings[-1].message
    with caplog.at_level(logging.WARNING, "qload"), open_checkpoint(source) as weights:
        weights.get_weights(NAME)
        weights.get_weights(NAME)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [NAME]


def test_a_layer_in_doubt_is_read_as_its_writer_writes_or_as_other_layers_are(tmp_path: Path) -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 128, 0.002)
    named = config(4, 128, meta={"quantizer": ["gptqmodel:7.7.0"]})
    stored = tensors(codes, scales, whole_words(zeros, 4), 4)
    assert verify(model(tmp_path, stored, quantization_config=named)).verdict == "ok"

    few = tensors(codes, scales, fields(zeros, 4), 4)
    codes, zeros, scales, _ = quantized(4, 512, 256, 128, 0.1)
    many = tensors(codes, scales, fields(zeros, 4), 4)
    both = {**few, **{name.replace("layers.0", "layers.1"): tensor for name, tensor in many.items()}}
    weights = loaded(both, config(4, 128))
    assert torch.equal(weights.get_weights(NAME).dequantize().half(), want)
    assert verify(model(tmp_path, both, quantization_config=config(4, 128))).verdict == "ok"


def test_codes_overrule_the_name_of_the_writer() -> None:
    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0.1)
    stored = tensors(codes, scales, fields(zeros, 4), 4)

    weight = loaded(stored, config(4, 64, meta={"quantizer": ["gptqmodel:7.7.0"]})).get_weights(NAME)

    assert torch.equal(weight.dequantize().half(), want)


@WRITERS
def test_eight_bits_are_a_doubt_as_one_step_is_too_little_to_be_seen(write: Any, tmp_path: Path) -> None:
    codes, zeros, scales, _ = quantized(8, 512, 256, 128, 0.1)
    stored = tensors(codes, scales, write(zeros, 8), 8)

    assert rules(verify(model(tmp_path, stored, quantization_config=config(8, 128)))) == {
        "zero-point-reading"
    }


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 64), (4, 64), (8, 128)])
def test_zero_points_under_ones_are_lost_and_no_load_makes_them_up(
    bits: int, group: int, tmp_path: Path
) -> None:
    codes, zeros, scales, _ = quantized(bits, 512, 256, group, 0.02)
    source = model(
        tmp_path, tensors(codes, scales, ones(zeros, bits), bits), quantization_config=config(bits, group)
    )

    found = {finding.rule: finding for finding in verify(source).findings}
    assert found.keys() == {"zero-point-reading"}
    assert (found["zero-point-reading"].severity, found["zero-point-reading"].tensor) == (
        "error",
        f"{NAME}.qzeros",
    )
    with open_checkpoint(source) as weights, pytest.raises(MismatchError, match="zero points are lost"):
        weights.get_weights(NAME)
    with open_checkpoint(source) as weights:
        own = weights.loader.with_config(zeros=StoredMinusOnePerField())  # type: ignore[attr-defined]
        with weights.use_loader(own):
            assert weights.get_weights(NAME).shape == (256, 512)


def test_columns_without_a_weight_below_0_have_lost_nothing(tmp_path: Path) -> None:
    """Eight columns whose zero points are 0 in every group: words of ones, as each field says."""
    floats = drawn(512, 256, 64, 0)
    floats[:, :, 40:48] = floats[:, :, 40:48].abs()
    low, high = floats.amin(1).clamp(max=0), floats.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.double()).round().long().clamp(0, 15)
    codes = (
        ((floats / scales.double()[:, None]).round() + zeros[:, None]).long().clamp(0, 15).reshape(512, 256)
    )
    stored = tensors(codes, scales, fields(zeros, 4), 4)

    report = verify(model(tmp_path, stored, quantization_config=config(4, 64)))

    assert {finding.severity for finding in report.findings} <= {"warning"}
    loaded(stored, config(4, 64)).get_weights(NAME)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize(("stored_as", "claimed"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_a_convention_that_codes_deny_is_refused_by_every_load(
    bits: int, group: int, stored_as: str, claimed: str, tmp_path: Path
) -> None:
    codes, zeros, scales, want = quantized(bits, 512, 256, 512 if group == -1 else group, 0, seed=3)
    words = packed(zeros, bits) if stored_as == "gptq_v2" else fields(zeros, bits)
    stored = tensors(codes, scales, words, bits)

    right = loaded(stored, config(bits, group, checkpoint_format=stored_as)).get_weights(NAME)
    assert torch.equal(right.dequantize().half(), want)
    wrong = loaded(stored, config(bits, group, checkpoint_format=claimed))
    for load in ("get_weights", "get_weights_col", "get_weights_row"):
        with pytest.raises(MismatchError, match=r"qzeros: zero points are one off(.|\n)*checkpoint_format"):
            getattr(wrong, load)(NAME)
    source = model(tmp_path, stored, quantization_config=config(bits, group, checkpoint_format=claimed))
    assert rules(verify(source)) == {"zero-point-mean"}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("stored_as", "claimed"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_symmetric_layers_one_beside_the_middle_are_refused(bits: int, stored_as: str, claimed: str) -> None:
    codes, zeros, scales, _ = quantized(bits, 512, 256, 64, 0)
    middle = torch.full_like(zeros, 2 ** (bits - 1))
    words = packed(middle, bits) if stored_as == "gptq_v2" else fields(middle, bits)
    stored = tensors(codes, scales, words, bits)

    loaded(stored, config(bits, 64, sym=True, checkpoint_format=stored_as)).get_weights(NAME)
    with pytest.raises(MismatchError, match=f"expected {2 ** (bits - 1)} in every group, as sym is true"):
        loaded(stored, config(bits, 64, sym=True, checkpoint_format=claimed)).get_weights(NAME)


@pytest.mark.parametrize("claims", [{}, {"sym": False}])
@pytest.mark.parametrize(("stored_as", "mean"), [("gptq", -0.4), ("gptq_v2", 0.4)])
def test_zero_points_in_the_middle_are_right_whatever_the_mean_of_weights(
    stored_as: str, mean: float, claims: dict[str, Any], tmp_path: Path
) -> None:
    """Symmetric layers of weights about -0.4 or 0.4 have codes a step from their zero points."""
    weights = torch.randn(512, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + mean
    grouped = weights.reshape(8, 64, 256)
    scales = (grouped.abs().amax(1) / 7.5).half()
    codes = ((grouped / scales.double()[:, None]).round() + 8).clamp(0, 15).long().reshape(512, 256)
    middle = torch.full((8, 256), 8)
    words = packed(middle, 4) if stored_as == "gptq_v2" else fields(middle, 4)
    own = {name: value for name, value in config(4, 64, checkpoint_format=stored_as).items() if name != "sym"}
    stored = tensors(codes, scales, words, 4)

    weight = loaded(stored, {**own, **claims}).get_weights(NAME)
    want = ((codes - 8).double() * scales.double().repeat_interleave(64, 0)).T.half()
    assert torch.equal(weight.dequantize().half(), want)
    source = model(tmp_path, stored, quantization_config={**own, **claims})
    assert verify(source).verdict == "ok"


def test_codes_that_are_noise_deny_nothing() -> None:
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (512, 256), generator=make)
    scales = torch.ones(8, 256, dtype=torch.float16)
    stored = tensors(codes, scales, torch.full((8, 32), 0x22222222, dtype=torch.int32), 4)

    assert loaded(stored, config(4, 64)).get_weights(NAME).shape == (256, 512)


def test_parts_of_a_fused_layer_and_experts_agree_where_one_has_no_zero_point_of_0() -> None:
    stored: dict[str, Tensor] = {}
    want: list[Tensor] = []
    for at, share in enumerate((0, 0.1)):
        codes, zeros, scales, meant = quantized(4, 512, 256, 64, share, seed=at)
        own = tensors(codes, scales, fields(zeros, 4), 4)
        stored |= {name.replace("up_proj", f"part{at}"): tensor for name, tensor in own.items()}
        want.append(meant)

    weights = loaded(stored, config(4, 64))
    fused = weights.get_multi_weights_col([NAME.replace("up_proj", f"part{at}") for at in (0, 1)])

    assert torch.equal(fused.dequantize().half(), torch.cat(want))


def test_zero_points_of_0_under_codes_about_the_middle_are_not_lost() -> None:
    """Evenly spread weights above 0 have codes about the middle, as where zero points were lost."""
    floats = drawn(512, 256, 64, 0)
    make = torch.Generator().manual_seed(1)
    above = torch.rand(8, 1, 256, generator=make) < 0.2
    floats = torch.where(above, torch.rand(floats.shape, generator=make, dtype=torch.float64), floats)
    low, high = floats.amin(1).clamp(max=0), floats.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.double()).round().long().clamp(0, 15)
    codes = ((floats / scales.double()[:, None]).round() + zeros[:, None]).long().clamp(0, 15)
    want = ((codes - zeros[:, None]).double() * scales.double()[:, None]).reshape(512, 256).T.half()

    stored = tensors(codes.reshape(512, 256), scales, fields(zeros, 4), 4)

    assert torch.equal(loaded(stored, config(4, 64)).get_weights(NAME).dequantize().half(), want)


def test_a_few_columns_decide_where_many_have_zero_points_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, zeros, scales, want = quantized(4, 512, 1024, 64, 0.5)
    stored = tensors(codes, scales, fields(zeros, 4), 4)
    compared: list[int] = []
    means = zero_point_evidence._mean_codes

    def counted(values: Any, bits: int, columns: Tensor, groups: int) -> Any:
        compared.append(len(columns))
        return means(values, bits, columns, groups)

    monkeypatch.setattr(zero_point_evidence, "_mean_codes", counted)

    weight = loaded(stored, config(4, 64)).get_weights(NAME)

    assert torch.equal(weight.dequantize().half(), want)
    assert max(compared) <= 2 * zero_point_evidence.FIRST_COLUMNS < 1024


@pytest.mark.parametrize("sym", [False, True])
def test_layers_are_decided_where_the_default_device_is_another(sym: bool) -> None:
    """transformers builds models under torch.device("meta"), and loads their tensors there."""
    codes, zeros, scales, want = quantized(4, 512, 256, 64, 0 if sym else 0.1)
    middle = torch.full_like(zeros, 8)
    stored = tensors(codes, scales, fields(middle if sym else zeros, 4), 4)

    with torch.device("meta"):
        weight = loaded(stored, config(4, 64, sym=sym)).get_weights(NAME)

    own = loaded(stored, config(4, 64, sym=sym)).get_weights(NAME)
    assert weight.config == own.config
    assert torch.equal(weight.dequantize(), own.dequantize())
    assert sym or torch.equal(weight.dequantize().half(), want)


def several(*layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layers 0, 1, ... of a model."""
    return {
        name.replace("layers.0", f"layers.{at}"): tensor
        for at, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


def test_every_layer_is_read_alike_where_the_config_says_sym_and_none_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drawn_layers = [quantized(4, 512, 256, 64, 0.1, seed) for seed in range(4)]
    stored = several(*(tensors(c, s, fields(z, 4), 4) for c, z, s, _ in drawn_layers))

    weights = loaded(stored, config(4, 64) | {"sym": True})
    with caplog.at_level(logging.WARNING, "qload"):
        for at, (*_, want) in enumerate(drawn_layers):
            weight = weights.get_weights(NAME.replace("layers.0", f"layers.{at}"))
            assert torch.equal(weight.dequantize().half(), want), at

    (record,) = caplog.records
    assert record.getMessage().startswith(f"{NAME}: the config says sym is true")

    for at in (0, 1, 2):
        codes, zeros, scales, _ = quantized(4, 512, 256, 64, 0)
        layer = several(*[tensors(codes, scales, fields(torch.full_like(zeros, 8), 4), 4)] * (at + 1))
        stored |= {name: tensor for name, tensor in layer.items() if f"layers.{at}." in name}
    weights = loaded(stored, config(4, 64) | {"sym": True})
    caplog.clear()
    for at in range(4):
        weights.get_weights(NAME.replace("layers.0", f"layers.{at}"))
    (record,) = caplog.records
    assert record.getMessage().startswith(NAME.replace("layers.0", "layers.3"))


def test_layers_of_a_rule_are_compared_with_its_claims_and_read_as_those_of_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [quantized(4, 512, 256, 64, 0.1, seed) for seed in range(3)]
    codes, zeros, scales, want = quantized(4, 512, 256, 128, 0.002)
    rule = {"dynamic": {r"+:.*layers\.3\..*": {"group_size": 128}}}
    few = tensors(codes, scales, fields(zeros, 4), 4)
    stored = several(*(tensors(c, s, fields(z, 4), 4) for c, z, s, _ in many), few)
    last = NAME.replace("layers.0", "layers.3")

    assert torch.equal(loaded(stored, config(4, 64, **rule)).get_weights(last).dequantize().half(), want)

    sound = [quantized(4, 512, 256, 64, 0, seed) for seed in range(3)]
    stored = several(*(tensors(c, s, fields(z, 4), 4) for c, z, s, _ in sound), few)
    with caplog.at_level(logging.WARNING, "qload"):
        loaded(stored, config(4, 64, **rule)).get_weights(last)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{last}: programs wrap zero points of 0, stored minus one")

    codes, zeros, scales, _ = quantized(4, 512, 256, 128, 0, seed=9)
    stored |= {last + name[len(NAME) :]: t for name, t in tensors(codes, scales, packed(zeros, 4), 4).items()}
    weights = loaded(stored, config(4, 64, **rule))
    for at in range(3):
        weights.get_weights(NAME.replace("layers.0", f"layers.{at}"))
    with pytest.raises(MismatchError, match="zero points are one off"):
        weights.get_weights(last)


def test_broken_layers_are_no_evidence() -> None:
    many = [quantized(4, 512, 256, 64, 0.1, seed) for seed in range(3)]
    codes, zeros, scales, want = quantized(4, 512, 256, 128, 0.002)
    few = tensors(codes, scales, fields(zeros, 4), 4)
    stored = several(*(tensors(c, s, fields(z, 4), 4) for c, z, s, _ in many), few)
    stored["model.layers.0.broken.qzeros"] = torch.zeros(2, 2, dtype=torch.int32)
    rules = {"dynamic": {r"+:.*layers\.3\..*": {"group_size": 128}}}

    weight = loaded(stored, config(4, 64, **rules)).get_weights(NAME.replace("layers.0", "layers.3"))

    assert (weight.config.evidence, weight.config.zeros) == ("others", StoredMinusOnePerField())
    assert torch.equal(weight.dequantize().half(), want)


@WRITERS
def test_a_layer_that_is_claimed_to_be_symmetric_is_told_by_one_rule(write: Any, tmp_path: Path) -> None:
    codes, zeros, scales, _ = quantized(4, 512, 256, 128, 0.002)
    stored = tensors(codes, scales, write(zeros, 4), 4)
    claims = config(4, 128) | {"sym": True}

    assert rules(verify(model(tmp_path, stored, quantization_config=claims))) == {"symmetry"}


def test_experts_are_one_stack_where_one_of_them_has_no_zero_point_of_0() -> None:
    stored: dict[str, Tensor] = {}
    want: dict[str, Tensor] = {}
    for at, (expert, name) in enumerate(
        (expert, name) for expert in range(3) for name in ("gate_proj", "up_proj", "down_proj")
    ):
        own = f"model.layers.0.mlp.experts.{expert}.{name}"
        codes, zeros, scales, want[own] = quantized(4, 256, 256, 64, 0.2 * (expert == 1), seed=at)
        layer = tensors(codes, scales, fields(zeros, 4), 4)
        stored |= {own + key[len(NAME) :]: tensor for key, tensor in layer.items()}

    made = loaded(stored, config(4, 64)).get_experts("model.layers.0.mlp.experts", facts=FACTS)

    for expert in range(3):
        gate_up, down = made.dequantize(expert)
        own = [want[f"model.layers.0.mlp.experts.{expert}.{name}"] for name in ("gate_proj", "up_proj")]
        assert torch.equal(gate_up.half(), torch.cat(own))
        assert torch.equal(down.half(), want[f"model.layers.0.mlp.experts.{expert}.down_proj"])


@pytest.mark.parametrize(("prefix", "is_read"), [("lm_head", True), ("model.layers.0.mlp.up_proj", False)])
def test_a_head_may_have_a_mean_of_its_own(prefix: str, is_read: bool) -> None:
    codes, zeros, scales, _ = quantized(4, 512, 256, 64, 0)
    own = tensors(codes, scales, packed(zeros, 4), 4)
    weights = loaded({name.replace(NAME, prefix): tensor for name, tensor in own.items()}, config(4, 64))

    if is_read:
        assert weights.get_weights(prefix).shape == (256, 512)
    else:
        with pytest.raises(MismatchError, match="one off"):
            weights.get_weights(prefix)


def converted(source: Path, to: Path) -> tuple[int, str]:
    """The exit code and the output of a conversion to AWQ."""
    from click.testing import CliRunner

    from qload.cli import main

    done = CliRunner().invoke(main, ["convert", str(source), "-o", str(to), "--to", "awq"])
    return done.exit_code, " ".join(done.output.split())


def test_a_convention_that_codes_deny_is_not_converted(tmp_path: Path) -> None:
    codes, zeros, scales, _ = quantized(4, 512, 256, 64, 0)
    stored = tensors(codes, scales, packed(zeros, 4), 4)
    (tmp_path / "from").mkdir()
    source = model(tmp_path / "from", stored, quantization_config=config(4, 64))

    code, output = converted(source, tmp_path / "awq")

    assert code != 0
    assert f"{NAME}.qzeros: zero points are one off" in output
    assert not (tmp_path / "awq").exists()


def test_a_doubt_is_told_by_a_conversion(tmp_path: Path) -> None:
    codes, zeros, scales, _ = quantized(4, 512, 256, 128, 0.002)
    stored = tensors(codes, scales, whole_words(zeros, 4), 4)
    (tmp_path / "from").mkdir()
    source = model(tmp_path / "from", stored, quantization_config=config(4, 128))

    code, output = converted(source, tmp_path / "awq")

    assert code == 0
    assert f"{NAME}: programs wrap zero points of 0, stored minus one" in output


def test_zero_points_of_stacked_experts_are_compared_by_their_last_axis() -> None:
    middle = packed(torch.full((4, 16), 7), 4).expand(3, 4, 2).clone()
    other = middle.clone()
    other[2, 1, 1] += 1

    for words, expected in ((middle, True), (other, False)):
        parameter = torch.nn.Parameter(words, requires_grad=False)  # compared by torch, as on a GPU
        assert has_middle_zeros(words, 4, StoredMinusOne()) is expected
        assert has_middle_zeros(parameter, 4, StoredMinusOne()) is expected
