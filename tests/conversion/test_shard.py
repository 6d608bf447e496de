"""Sharding of a checkpoint: each folder has the tensors of its rank, or there is no output."""

import json
import sys
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qload import convert, open_checkpoint, plan, shard
from qload.conversion import ShardedCheckpoint
from qload.conversion.atomic_folder import AtomicFolder
from qload.errors import ArgumentError
from qload.errors.reporting import cause_of
from qload.parallel import Rank
from qload.testing import make_checkpoint
from tests.cli.test_several import run
from tests.conversion.interruption import interrupted
from tests.models.drawn import config, tensors
from tests.paths import FIXTURES
from tests.verify.checkpoints import model

pytestmark = pytest.mark.usefixtures("seen_texts")

UP, DOWN, Q = (f"model.layers.0.{name}" for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"))
EXPERT = "model.layers.1.mlp.experts.{}.down_proj"


def made(format: str, folder: Path, name: str = "llama") -> Path:
    make_checkpoint(format, folder, model=name)
    return folder


def details(found: ShardedCheckpoint) -> dict[str, str]:
    return {layer.name: layer.detail for layer in found.layers if layer.outcome == "refused"}


@pytest.mark.parametrize("format", ["plain", "gptq", "gptq-8bit", "awq", "compressed-tensors"])
def test_a_rank_of_the_whole_is_what_its_folder_gives(format: str, tmp_path: Path) -> None:
    source = made(format, tmp_path / "in")
    found = shard(source, tmp_path / "out", tp=2)

    assert (found.verdict, set(found.counts)) == ("ok", {"bits"})
    for rank in range(2):
        with ExitStack() as stack:
            whole = stack.enter_context(open_checkpoint(source, process_group=Rank(rank, 2)))
            mine = stack.enter_context(open_checkpoint(tmp_path / "out" / f"rank-{rank}"))
            for name, want in ((UP, whole.get_weights_col(UP)), (DOWN, whole.get_weights_row(DOWN))):
                assert torch.equal(mine.get_weights(name).dequantize(), want.dequantize())


def test_vocabularies_norms_and_heads_are_as_a_model_has_them(tmp_path: Path) -> None:
    """Expect rows of the embedding, whole query heads, and complete norms."""
    source = made("plain", tmp_path / "in")
    before = load_file(source / "model.safetensors")
    shard(source, tmp_path / "out", tp=2)
    after = [load_file(tmp_path / "out" / f"rank-{rank}" / "model.safetensors") for rank in range(2)]

    assert after[0].keys() == before.keys()
    for name in ("model.embed_tokens.weight", f"{Q}.weight"):
        assert torch.equal(torch.cat([each[name] for each in after]), before[name])
    assert all(torch.equal(each["model.norm.weight"], before["model.norm.weight"]) for each in after)


def test_biases_go_with_outputs_and_with_the_first_rank(tmp_path: Path) -> None:
    said = config("llama", attention_bias=True)
    stored = tensors(said)
    (tmp_path / "in").mkdir()
    model(tmp_path / "in", stored, **said)
    found = shard(tmp_path / "in", tmp_path / "out", tp=2)
    first, second = (load_file(tmp_path / "out" / f"rank-{at}" / "model.safetensors") for at in range(2))
    out = Q.replace("q_proj", "o_proj")

    assert torch.equal(torch.cat([first[f"{Q}.bias"], second[f"{Q}.bias"]]), stored[f"{Q}.bias"])
    assert torch.equal(first[f"{out}.bias"], stored[f"{out}.bias"])
    assert f"{out}.bias" not in second
    assert any("folder of rank 0 alone" in note for note in found.notes)


def test_whole_experts_go_to_runs_of_ranks(tmp_path: Path) -> None:
    source = made("awq", tmp_path / "in", "qwen3_moe")
    found = shard(source, tmp_path / "out", tp=2, ep=2)
    held = [load_file(tmp_path / "out" / f"rank-{rank}" / "model.safetensors") for rank in range(2)]
    numbers = [{at for at in range(8) if f"{EXPERT.format(at)}.qweight" in each} for each in held]

    assert found.verdict == "ok"
    assert {layer.cut for layer in found.layers if ".experts." in layer.name} == {"experts"}
    assert numbers[0]
    assert numbers[1]
    assert not numbers[0] & numbers[1]
    whole = load_file(source / "model.safetensors")
    for at in numbers[1]:
        assert torch.equal(held[1][f"{EXPERT.format(at)}.qweight"], whole[f"{EXPERT.format(at)}.qweight"])


def test_what_cannot_be_cut_is_refused_in_the_words_of_plan_for_every_layer(tmp_path: Path) -> None:
    source = made("fp8-block", tmp_path / "in")
    found = shard(source, tmp_path / "out", tp=2)
    planned = plan(source, tp=2).layers
    reasons = {layer.prefix: layer.shares[2].reason for layer in planned if not layer.shares[2].fits}

    assert found.verdict == "findings"
    assert len(reasons) > 1
    assert details(found) == reasons
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("gptq/model_g32_desc_act", "its share alone is not a valid gptq layer"),
        ("experts/model_nvfp4_gpt_oss", "is stored in one tensor with other experts"),
        ("torchao/float8_row", "only torchao writes such headers"),
        ("torchao/intx_w3_g64", "only torchao writes such headers"),
    ],
)
def test_shares_that_no_file_says_are_refused(source: str, reason: str, tmp_path: Path) -> None:
    found = shard(FIXTURES / source, tmp_path / "out", tp=2)

    assert found.verdict == "findings"
    assert any(reason in detail for detail in details(found).values())
    assert [*tmp_path.iterdir()] == []


def test_the_certificate_and_what_stands_beside(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    (source / "tokenizer.json").write_text("{}")
    shard(source, tmp_path / "out", tp=2, shard_size=20_000)
    folder = tmp_path / "out"
    said = json.loads((folder / "qload-certificate.json").read_text())
    files = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "qload-certificate.json"
    }

    assert said["files"] == files
    assert (said["tp"], said["ep"], set(said["counts"])) == (2, None, {"bits"})
    for rank in ("rank-0", "rank-1"):
        assert (folder / rank / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert (folder / rank / "tokenizer.json").read_text() == "{}"
        index = json.loads((folder / rank / "model.safetensors.index.json").read_text())
        assert {folder / rank / file for file in index["weight_map"].values()} == {
            *(folder / rank).glob("*.safetensors")
        }


@pytest.mark.parametrize("after", [1, 3])
def test_it_goes_on_where_it_was_and_writes_the_same(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("gptq", tmp_path / "in")
    shard(source, tmp_path / "whole", tp=2, shard_size=40_000)
    with interrupted(after, monkeypatch):
        shard(source, tmp_path / "out", tp=2, shard_size=40_000)
    with pytest.raises(ArgumentError, match="left by another conversion"):
        shard(source, tmp_path / "out", tp=2, shard_size=20_000)
    there = {path: path.stat().st_ino for path in (tmp_path / ".out.qload-unfinished").rglob("*.safetensors")}
    assert len(there) == after
    assert shard(source, tmp_path / "out", tp=2, shard_size=40_000).verdict == "ok"
    kept = {path.stat().st_ino for path in (tmp_path / "out").rglob("*.safetensors")}
    assert {*there.values()} <= kept
    one, other = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("whole", "out")
    )
    assert one == other


@pytest.mark.parametrize("name", [f"{UP}.qweight", f"{DOWN}.scales"])
def test_a_share_that_reads_back_as_something_else_is_not_handed_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("gptq", tmp_path / "in")
    complete = AtomicFolder.complete

    def damaging(folder: AtomicFolder, file: str) -> None:
        if file == "rank-1/model.safetensors":
            held = load_file(folder.part_path(file))
            held[name].view(torch.uint8)[-1, -1] ^= 1
            save_file(held, folder.part_path(file))
        complete(folder, file)

    monkeypatch.setattr(AtomicFolder, "complete", damaging)
    found = shard(source, tmp_path / "out", tp=2)
    (wrong,) = (layer for layer in found.layers if not layer.well)

    assert (found.verdict, found.folder, wrong.name) == ("findings", "", name.rpartition(".")[0])
    assert wrong.detail == "rank 1: the weights differ"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_folder_that_does_not_open_is_told_of_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made("gptq", tmp_path / "in")
    monkeypatch.setattr(sys.modules[shard.__module__], "CONFIGS", ())
    found = shard(source, tmp_path / "out", tp=2)

    assert found.verdict == "findings"
    assert all(layer.detail.startswith("rank ") for layer in found.layers if not layer.well)


def test_one_rank_has_all_and_a_copy_means_the_same(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    shard(source, tmp_path / "out", tp=1)
    one, other = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out" / "rank-0"))

    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert convert(tmp_path / "out" / "rank-0", tmp_path / "awq", to="awq").verdict == "ok"


@pytest.mark.parametrize(
    "asked", [{"tp": 0}, {"tp": 1 << 20}, {"tp": 2, "ep": 0}, {"tp": 2, "ep": 2}, {"tp": 2, "shard_size": 0}]
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, int], tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    with pytest.raises(ArgumentError):
        shard(source, tmp_path / "out", **asked)  # type: ignore[arg-type]


def test_what_cannot_be_read_is_the_verdict(tmp_path: Path) -> None:
    found = shard(tmp_path / "nothing", tmp_path / "out", tp=2)

    assert found.verdict == "unreadable"
    assert not (tmp_path / "out").exists()


def test_layers_of_gguf_are_refused_and_no_number_of_ranks_is_named(tmp_path: Path) -> None:
    found = shard(FIXTURES / "gguf" / "all_types" / "model.gguf", tmp_path / "out", tp=2)

    assert (found.verdict, found.notes, found.counts) == ("findings", [], {"refused": len(found.layers)})
    assert {*details(found).values()} == {
        "no program reads blocks of GGUF in safetensors; each rank loads its share from the GGUF file"
    }
    assert not (tmp_path / "out").exists()


def test_a_refusal_names_the_numbers_of_ranks_that_suit_all_layers(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")
    lawful = plan(source, tp=64).lawful

    assert lawful is not None
    assert shard(source, tmp_path / "out", tp=64).notes == [lawful.text()]
    for ranks in lawful.ranks[:3]:
        assert shard(source, tmp_path / str(ranks), tp=ranks).verdict == "ok"


def test_alike_refusals_are_one_line_with_whole_sentences(tmp_path: Path) -> None:
    source = made("gptq", tmp_path / "in")

    found = shard(source, tmp_path / "out", tp=64)
    shown = run("shard", source, "--tp", "64", "-o", tmp_path / "out", "--table").stdout

    causes = {cause_of(layer.detail, layer.name) for layer in found.layers}
    assert shown.count("refused  ") == len(causes) < len(found.layers)
    assert shown.count("\n      lawful   world sizes") == len(causes)
    assert "\\n" not in shown
