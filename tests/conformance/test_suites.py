"""The suites of loaders, packers and kernels of experts: sound subjects pass, wrong ones are told apart."""

import json
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload import FakeWorld, open_checkpoint
from qload.conformance import (
    ConformanceCase,
    ExpertsKernelSuite,
    LinearKernelSuite,
    LoaderSuite,
    PackerSuite,
)
from qload.conformance.expert_checks import ExpertChecks
from qload.conformance.loader_checks import (
    COLUMN,
    ROW,
    LoaderChecks,
    quantization_config,
    write_checkpoint,
)
from qload.conformance.packer_checks import PackerChecks
from qload.conformance.suites import Suite
from qload.errors import ArgumentError
from qload.layouts import gptq
from qload.spec import named
from qload.testing import Traits
from tests.conformance.subjects import message

FILES = ("gptq", "awq", "fp8", "bnb_nf4", "unquantized")
DAMAGES = ("cut_short_is_refused", "scales_missing_is_refused", "wrong_shape_is_refused")


class Loads(LoaderSuite):
    """qload's own loader."""

    format = "gptq"

    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        weights = open_checkpoint(files[0].parent, process_group=[*FakeWorld(world)][rank])
        found: dict[str, Tensor] = {}
        for names, load in ((COLUMN, weights.get_weights_col), (ROW, weights.get_weights_row)):
            for name in names:
                share = load(name)
                suffixes = {spec.name: spec.suffix for spec in type(share).tensors(share.config)}
                found |= {named(name, suffixes[field]): held for field, held in share.fields().items()}
        return found


def load_case(end: str, format: str = "gptq") -> ConformanceCase:
    suite = type("Any", (Loads,), {"format": format})
    return next(case for case in suite.cases() if case.id.endswith(end))


@pytest.mark.parametrize("world", ["k512n1024", "tp2", "tp8"])
@pytest.mark.parametrize("format", FILES)
def test_a_sound_loader_passes(format: str, world: str, tmp_path: Path) -> None:
    trial = LoaderChecks(Loads(), load_case(world, format), tmp_path)

    trial.shares_are_exact()
    trial.several_files_are_one()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("format", FILES[:3])
def test_a_sound_loader_refuses_damage(format: str, damage: str, tmp_path: Path) -> None:
    getattr(LoaderChecks(Loads(), load_case("k512n1024", format), tmp_path), damage)()


GPTQ_FILES = {"quant_method": "gptq", "bits": 4, "group_size": 32}
BNB_FILES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("traits", "config"),
    [
        (Traits("unquantized"), None),
        (
            Traits("gptq", group_size=32, zeros="v1"),
            {**GPTQ_FILES, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        ),
        (
            Traits("gptq", group_size=32, symmetric=False, act_order=True, zeros="v2"),
            {**GPTQ_FILES, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
        ),
        (
            Traits("awq", group_size=64, symmetric=False),
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        ),
        (Traits("fp8", variant="tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (
            Traits("fp8", variant="block"),
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        ),
        (
            Traits("bnb_fp4", dtype="bfloat16", variant="double"),
            {**BNB_FILES, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        ),
        (
            Traits("bnb_nf4", dtype="bfloat16"),
            {**BNB_FILES, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False},
        ),
    ],
)
def test_files_have_the_config_of_their_tool(
    traits: Traits, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int8), "c": torch.zeros(1)}
    files = write_checkpoint(tmp_path, tensors, ConformanceCase(**vars(traits), K=320, N=192), 2)

    assert [file.name for file in files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 32},
        "weight_map": {"a": files[0].name, "b": files[1].name, "c": files[0].name},
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "llama",
        "hidden_size": 320,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "torch_dtype": traits.dtype,
        **({} if config is None else {"quantization_config": config}),
    }


def test_formats_without_a_config_have_no_files() -> None:
    with pytest.raises(ArgumentError) as caught:
        quantization_config(Traits("eetq"))

    assert str(caught.value).splitlines() == [
        "format",
        "  expected one of unquantized, gptq, awq, fp8, bnb_nf4, bnb_fp4 for files",
        "  got      'eetq'",
    ]


class Rank0(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        return super().load(files, 0, world)


class Whole(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        return super().load(files, 0, 1)


class Casts(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        found = super().load(files, rank, world)
        return {name: held.float() if held.is_floating_point() else held for name, held in found.items()}


class Forgets(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        found = super().load(files, rank, world)
        return {name: held for name, held in found.items() if "down" not in name or "scales" not in name}


class Careless(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    ("suite", "end", "check", "says"),
    [
        (Rank0, "tp2", "shares_are_exact", "rank 1 of 2: .*the share of rank 0"),
        (Whole, "tp2", "shares_are_exact", "rank 0 of 2: .*the whole tensor"),
        (Casts, "k512n1024", "shares_are_exact", "scales: torch.float32, .*expected torch.float16"),
        (Forgets, "tp2", "several_files_are_one", "1 of .* are missing, the first .*down_proj.scales"),
        (
            Careless,
            "k512n1024",
            "cut_short_is_refused",
            "without its last byte was loaded, and an error was due",
        ),
        (Careless, "k512n1024", "scales_missing_is_refused", "without .*q_proj.scales was loaded"),
        (Careless, "k512n1024", "wrong_shape_is_refused", "without its first row was loaded"),
    ],
)
def test_a_wrong_loader_is_told_what_it_did(
    suite: type[Loads], end: str, check: str, says: str, tmp_path: Path, golden: SnapshotAssertion
) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        getattr(LoaderChecks(suite(), load_case(end), tmp_path), check)()

    assert message(caught.value) == golden


class RaisesAlways(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        raise KeyError(files[0].parent.name)


class RunsOut(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        if not files[0].parent.name.startswith("sound"):
            raise MemoryError
        return super().load(files, rank, world)


@pytest.mark.parametrize("check", DAMAGES)
def test_damage_is_not_refused_by_what_sound_files_raise_too(check: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="sound-"):
        getattr(LoaderChecks(RaisesAlways(), load_case("k512n1024"), tmp_path), check)()
    with pytest.raises(MemoryError):
        getattr(LoaderChecks(RunsOut(), load_case("k512n1024"), tmp_path), check)()


class RaisesWithoutText(Loads):
    def load(self, files: list[Path], rank: int, world: int) -> dict[str, Tensor]:
        if not files[0].parent.name.startswith("sound"):
            raise ValueError
        return super().load(files, rank, world)


def test_an_error_without_a_text_is_a_refusal_by_its_class(tmp_path: Path) -> None:
    checks = LoaderChecks(RaisesWithoutText(), load_case("k512n1024"), tmp_path)

    assert checks.cut_short_is_refused()["refused with"] == "ValueError: "


def test_the_error_that_refuses_is_reported(tmp_path: Path) -> None:
    said = LoaderChecks(Loads(), load_case("k512n1024"), tmp_path).cut_short_is_refused()

    assert said["refused with"].startswith("StorageError: model.safetensors: truncated")


def test_a_cut_through_a_group_has_to_be_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"no such cut exists: .*cannot cut K = 512 at 64 for 8 ranks"):
        LoaderChecks(Whole(), load_case("awq.w4.g128.k512n1024.tp8", "awq"), tmp_path).shares_are_exact()


class Packs(PackerSuite):
    """qload's own packing."""

    format = "gptq"

    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        return {"qweight": gptq.rows(case.bits).pack(codes.codes.T.contiguous().int())}

    def unpack(self, tensors: Any, case: ConformanceCase) -> Tensor:
        return gptq.rows(case.bits).unpack(tensors["qweight"]).T


class Reversed(Packs):
    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        words = super().pack(codes, case)["qweight"]
        return {"qweight": words.view(torch.uint8).reshape(-1, 4).flip(1).view(torch.int32).view(words.shape)}


class Swapped(Packs):
    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        pairs = codes.codes.reshape(codes.codes.shape[0], -1, 2).flip(2).reshape(codes.codes.shape)
        return {"qweight": gptq.rows(case.bits).pack(pairs.T.contiguous().int())}

    def unpack(self, tensors: Any, case: ConformanceCase) -> Tensor:
        return super().unpack(tensors, case).roll(1, 0)


class Named(Packs):
    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        return {"weight": codes.codes}


class InPlace(Packs):
    def pack(self, codes: Any, case: ConformanceCase) -> dict[str, Tensor]:
        codes.codes.add_(1)
        return {}


@pytest.mark.parametrize("case", Packs.cases("smoke"), ids=str)
def test_a_sound_packer_passes(case: ConformanceCase) -> None:
    trial = PackerChecks(Packs(), case)

    trial.packs_to_the_bit()
    trial.unpacks_what_is_stored()
    trial.the_codes_are_left_alone()


@pytest.mark.parametrize(
    ("suite", "check", "says"),
    [
        (Reversed, "packs_to_the_bit", "qweight: the bytes of words are reversed: "),
        (Swapped, "packs_to_the_bit", "qweight: the nibbles of bytes are swapped: "),
        (Swapped, "unpacks_what_is_stored", r"codes \(n, k\): .* differ, first at \(0, "),
        (Named, "packs_to_the_bit", "weight is no tensor of gptq: those are qweight, qzeros, scales, g_idx"),
        (InPlace, "packs_to_the_bit", "pack returned no tensor"),
        (InPlace, "the_codes_are_left_alone", "packing changes codes: "),
    ],
)
def test_a_wrong_packer_is_told_what_it_did(
    suite: type[Packs], check: str, says: str, golden: SnapshotAssertion
) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        getattr(PackerChecks(suite(), Packs.cases("smoke")[0]), check)()

    assert message(caught.value) == golden


def test_what_a_subject_cannot_show_is_skipped_with_the_reason(tmp_path: Path) -> None:
    only_packs = type("OnlyPacks", (Packs,), {"unpack": PackerSuite.unpack})()
    whole, shared = load_case("k512n1024"), load_case("tp2")
    one_group = ConformanceCase(**{**vars(whole), "group_size": -1})
    skipped = {
        "the subject only packs": lambda: PackerChecks(only_packs, whole).unpacks_what_is_stored(),
        "a packer packs whole layers": lambda: PackerChecks(Packs(), shared),
        "damage is shown to one rank": LoaderChecks(Loads(), shared, tmp_path).scales_missing_is_refused,
        "model.layers.0.self_attn.q_proj.scales has no second row": LoaderChecks(
            Loads(), one_group, tmp_path
        ).wrong_shape_is_refused,
    }
    for reason, check in skipped.items():
        with pytest.raises(pytest.skip.Exception) as caught:
            check()

        assert caught.value.msg == reason


SUITES = (LinearKernelSuite, ExpertsKernelSuite, LoaderSuite, PackerSuite)


@pytest.mark.parametrize("suite", SUITES)
def test_each_test_of_a_suite_runs_the_check_of_its_name(suite: type[Suite]) -> None:
    tests = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
    for name, test in tests.items():
        trial = Mock()
        options = {"damage": "scales-missing"} if "damage" in signature(test).parameters else {}
        test(None, trial, **options)

        check = "scales_missing_is_refused" if options else name.removeprefix("test_")
        assert trial.mock_calls == [call.check(check)]
    assert tests


class Experts(ExpertsKernelSuite):
    """qload's own reference."""

    format = "gptq"

    def pack(self, experts: Any) -> Any:
        return experts

    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y: Tensor = buffers.get_linear()(x, ids, weights)
        return y


class NextExpert(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, (ids + 1) % 4, weights, buffers)


class Unweighted(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, ids, torch.ones_like(weights), buffers)


class OneExpert(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, ids[:, :1], weights[:, :1], buffers)


class UpFirst(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y = torch.zeros(x.shape)
        for token, slot in ((m, s) for m in range(len(x)) for s in range(ids.shape[1])):
            gate_up, down = buffers.dequantize(int(ids[token, slot]))
            up, gate = (gate_up.half().float() @ x[token].float()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            y[token] += weights[token, slot] * (down.half().float() @ inner)
        return y.to(x.dtype)


class LosesAnOutput(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, ids, weights, buffers)
        y[:, -1] = 0
        return y


class MixesTokens(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x + 0 * x.sum(), ids, weights, buffers)


class SortsIds(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, ids, weights, buffers)
        ids.copy_(ids.flip(1))
        return y


@pytest.mark.parametrize("check", ["each_expert_alone", "stays_within_the_bound", "rows_do_not_mix"])
@pytest.mark.parametrize("format", ["gptq", "awq", "fp8", "mxfp8", "bnb_nf4"])
def test_a_sound_kernel_of_experts_passes(format: str, check: str) -> None:
    suite = type("Any", (Experts,), {"format": format})()
    for case in suite.cases("smoke")[:2]:
        getattr(ExpertChecks(suite, case, "cpu"), check)()


@pytest.mark.parametrize(
    ("suite", "check", "says"),
    [
        (NextExpert, "each_expert_alone", r"expert 0: .*\n  cause     tokens of expert 0 go to expert 1"),
        (Unweighted, "stays_within_the_bound", "the routing weights are left out: explains 100"),
        (OneExpert, "stays_within_the_bound", "only the first expert of each token counts"),
        (UpFirst, "stays_within_the_bound", "gate and up are swapped: explains"),
        (
            LosesAnOutput,
            "each_expert_alone",
            "cause     no known one",
        ),  # weights of one may as well be left out
        (MixesTokens, "rows_do_not_mix", "M = 2: NaN in token 1 reaches token 0"),
        (SortsIds, "keeps_to_its_buffers", "the kernel wrote into ids: "),
    ],
)
def test_a_wrong_kernel_of_experts_is_told_what_it_did(
    suite: type[Experts], check: str, says: str, golden: SnapshotAssertion
) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        getattr(ExpertChecks(suite(), Experts.cases("smoke")[0], "cpu"), check)()

    assert message(caught.value) == golden


def test_a_sound_kernel_of_experts_keeps_to_its_buffers() -> None:
    ExpertChecks(Experts(), Experts.cases("smoke")[0], "cpu").keeps_to_its_buffers()
