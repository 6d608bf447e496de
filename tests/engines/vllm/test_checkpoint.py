"""Which tensors a layer waits for, by the names that an engine gives its modules."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qload import loader_from_config, open_checkpoint
from qload.engines.vllm.checkpoint import CheckpointNames, PendingTensors
from qload.errors import StorageError, UnreadTensorsError
from qload.testing import make_checkpoint
from tests.support.unread import KINDS


class Renames:
    """As vLLM's mapper: a name, or None for one that it drops."""

    def __init__(self, before: str, after: str | None) -> None:
        self.before, self.after = before, after

    def map_name(self, name: str) -> str | None:
        if not name.startswith(self.before):
            return name
        return None if self.after is None else self.after + name.removeprefix(self.before)


def checkpoint(folder: Path, *names: str) -> CheckpointNames:
    save_file({name: torch.zeros(1) for name in names}, folder / "model.safetensors")
    return CheckpointNames(str(folder))


def test_a_layer_has_the_tensors_of_its_parts(tmp_path: Path) -> None:
    names = checkpoint(tmp_path, "a.q.qweight", "a.q.scales", "a.k.qweight", "a.qq.qweight")

    assert names.tensors_of(["a.q", "a.k"]) == {"a.q.qweight", "a.q.scales", "a.k.qweight"}


def test_names_with_dots_belong_to_the_layer(tmp_path: Path) -> None:
    names = checkpoint(tmp_path, "a.q.weight", "a.q.weight.absmax", "a.q.weight.quant_state.nf4")

    assert names.tensors_of(["a.q"]) == {"a.q.weight", "a.q.weight.absmax", "a.q.weight.quant_state.nf4"}
    assert {*names.suffixes("a.q")} == {"weight", "weight.absmax", "weight.quant_state.nf4"}


def test_mappers_follow_one_another(tmp_path: Path) -> None:
    names = checkpoint(tmp_path, "model.text.up.qweight", "model.text.up.scales", "model.rest.bias")
    names.add_mapper(Renames("model.text.", "text.model."))
    names.add_mapper(Renames("text.", "inner.text."))
    names.add_mapper(Renames("model.rest", None))

    assert names.tensors_of(["inner.text.model.up"]) == {
        "inner.text.model.up.qweight",
        "inner.text.model.up.scales",
    }
    assert names.stored_module("inner.text.model.up") == "model.text.up"
    assert names.under("model.rest") == set()


def test_what_one_mapper_makes_the_next_may_drop(tmp_path: Path) -> None:
    names = checkpoint(tmp_path, "head.weight", "body.weight")
    names.add_mapper(Renames("head.", "unused.head."))
    names.add_mapper(Renames("unused.", None))

    assert names.under("") == {"body.weight"}


def test_a_mapper_that_comes_late_is_heard(tmp_path: Path) -> None:
    names = checkpoint(tmp_path, "old.up.qweight")
    assert names.tensors_of(["old.up"]) == {"old.up.qweight"}

    names.add_mapper(Renames("old.", "new."))

    assert names.tensors_of(["old.up"]) == set()
    assert names.tensors_of(["new.up"]) == {"new.up.qweight"}


def test_embeddings_that_are_stored_quantized_are_told_from_plain_ones(tmp_path: Path) -> None:
    quantized = ("embed_tokens.weight", "embed_tokens.scale", "text.wte.weight", "text.wte.weight.absmax")
    plain = ("vision.embeddings.class_embedding", "vision.embeddings.patch.weight", "word_embeddings.weight")
    names = checkpoint(tmp_path, *quantized, *plain, "q_proj.weight", "q_proj.scale")

    assert names.embeddings({"scale", "weight.absmax"}) == ["embed_tokens", "text.wte"]
    assert names.is_plain("word_embeddings")
    assert not names.is_plain("embed_tokens")
    assert not names.is_plain("of which nothing is stored")


def test_of_files_that_are_not_there_yet_nothing_is_known(tmp_path: Path) -> None:
    names = CheckpointNames(str(tmp_path))
    assert names.tensors_of(["up"]) == set()
    assert names.stored_module("up") == "up"

    save_file({"up.weight": torch.zeros(1)}, tmp_path / "model.safetensors")

    assert names.tensors_of(["up"]) == {"up.weight"}


def test_the_last_tensor_is_told_from_those_before() -> None:
    pending = PendingTensors({"a", "b"})

    assert not pending.mark_loaded("a")
    assert not pending.mark_loaded("a")
    assert pending.mark_loaded("b")


def test_where_nothing_is_known_no_tensor_is_the_last() -> None:
    assert not PendingTensors(set()).mark_loaded("a")


def test_tensors_that_no_format_reads_are_refused_before_any_is_loaded(tmp_path: Path) -> None:
    for at, (kind, make) in enumerate(KINDS.items()):
        given = make(tmp_path / str(at))
        with open_checkpoint(given.folder) as weights, pytest.raises(UnreadTensorsError) as caught:
            CheckpointNames(str(given.folder)).check_all_read(weights.loader)
        assert caught.value.unread.keys() == given.unread.keys(), kind


def test_what_is_read_is_not_refused_and_files_that_are_not_there_are_not_asked(tmp_path: Path) -> None:
    make_checkpoint("fp8-block", tmp_path / "sound", model="qwen3_moe")
    with open_checkpoint(tmp_path / "sound") as weights:
        CheckpointNames(str(tmp_path / "sound")).check_all_read(weights.loader)
        CheckpointNames().check_all_read(weights.loader)


def files(folder: Path, *names: str) -> None:
    for name in names:
        save_file({f"{name}.weight": torch.zeros(1)}, folder / name)


@pytest.mark.parametrize(
    "names",
    [
        ["gptq_model-4bit-128g.safetensors"],
        ["out-00001-of-00002.safetensors", "out-00002-of-00002.safetensors"],
    ],
)
def test_files_of_other_names_are_those_that_vllm_reads(names: list[str], tmp_path: Path) -> None:
    files(tmp_path, *names)

    CheckpointNames(str(tmp_path)).check_all_read(loader_from_config(None))


def test_files_that_vllm_alone_reads_are_refused_by_name(tmp_path: Path) -> None:
    files(tmp_path, "model.safetensors", "old.safetensors")

    with pytest.raises(StorageError, match=r"vLLM alone reads old\.safetensors\n  remedy   move") as caught:
        CheckpointNames(str(tmp_path)).check_all_read(loader_from_config(None))
    assert str(tmp_path) in str(caught.value)


def test_files_that_the_index_leaves_out_are_read_by_neither(tmp_path: Path) -> None:
    files(tmp_path, "model-1.safetensors", "model-2.safetensors", "old.safetensors")
    index = {
        "weight_map": {f"{name}.weight": name for name in ("model-1.safetensors", "model-2.safetensors")}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    CheckpointNames(str(tmp_path)).check_all_read(loader_from_config(None))


def test_files_that_an_index_of_another_name_leaves_out_are_refused_by_name(tmp_path: Path) -> None:
    files(tmp_path, "output.safetensors", "old.safetensors")
    index = {"weight_map": {"output.safetensors.weight": "output.safetensors"}}
    (tmp_path / "output.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(StorageError, match=r"vLLM alone reads old\.safetensors"):
        CheckpointNames(str(tmp_path)).check_all_read(loader_from_config(None))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("quantize_config.json", '{"bits": 8, "group_size": 128}'),
        ("quantize_config.json", "{"),
        ("config.json", '{"model_type": "llama", "quantization_config": {"quant_method": "unknown"}}'),
    ],
)
def test_configs_that_vllm_overrides_are_not_judged(file: str, text: str, tmp_path: Path) -> None:
    make_checkpoint("gptq", tmp_path / "sound")
    with open_checkpoint(tmp_path / "sound") as weights:
        loader = weights.loader
        (tmp_path / "sound" / file).write_text(text)
        CheckpointNames(str(tmp_path / "sound")).check_all_read(loader)
