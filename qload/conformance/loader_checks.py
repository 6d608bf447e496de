"""The checks of `LoaderSuite`: shares equal qload's, from one file or several; damaged files are refused."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.devices.tensors import dense
from qload.errors import ArgumentError, CutError, DivideError
from qload.parallel import FakeWorld
from qload.spec import Weight, named
from qload.testing import checks
from qload.testing.layer_factory import layer_of
from qload.testing.random_layer import DrawnLayer
from qload.testing.traits import Traits
from qload.weights import Weights

BLOCK = "model.layers.0"
COLUMN = (f"{BLOCK}.self_attn.q_proj", f"{BLOCK}.mlp.up_proj")
ROW = (f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj")
LOADS: tuple[tuple[tuple[str, ...], Callable[..., Weight]], ...] = (
    (COLUMN, Weights.get_weights_col),
    (ROW, Weights.get_weights_row),
)


def make_layers(case: ConformanceCase) -> dict[str, DrawnLayer]:
    """Return the four layers of a `case` by name, each with other numbers."""
    sizes = ((case.K, case.K), (case.N, case.K), (case.K, case.K), (case.K, case.N))
    return {
        name: layer_of(case.traits, N, K, filling="noise", seed=seed)
        for seed, (name, (N, K)) in enumerate(zip((*COLUMN, *ROW), sizes, strict=True))
    }


def quantization_config(traits: Traits) -> dict[str, Any] | None:
    """Return the `quantization_config` of layers with these `traits`; None for plain ones.

    ArgumentError for a format without a known config.
    """
    if traits.format not in _CONFIGS:
        raise ArgumentError("format", f"one of {', '.join(_CONFIGS)} for files", repr(traits.format))
    return _CONFIGS[traits.format](traits)


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Tensor], case: ConformanceCase, files: int
) -> list[Path]:
    """Write `tensors` to a number of `files` in a `folder` with the config of a `case`; return the paths."""
    folder.mkdir(exist_ok=True)
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": case.K, "intermediate_size": case.N}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8, "torch_dtype": case.dtype}
    quantization = quantization_config(case.traits)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if files == 1:
        parts = {"model.safetensors": names}
    else:
        parts = {f"model-{at + 1:05}-of-{files:05}.safetensors": names[at::files] for at in range(files)}
        weight_map = {name: file for file, part in parts.items() for name in part}
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
    return [folder / file for file in parts]


def _gptq(traits: Traits) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": traits.bits,
        "group_size": traits.group_size,
        "desc_act": traits.act_order,
        "sym": traits.symmetric,
        "checkpoint_format": "gptq_v2" if traits.zeros == "v2" else "gptq",
    }


def _awq(traits: Traits) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": traits.bits, "group_size": traits.group_size, "version": "gemm"}
    return {**config, "zero_point": not traits.symmetric}


def _fp8(traits: Traits) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {**config, "weight_block_size": [128, 128]} if traits.variant == "block" else config


def _bnb(traits: Traits) -> dict[str, Any]:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": traits.dtype}
    double = traits.variant == "double"
    return {**config, "bnb_4bit_quant_type": traits.format[-3:], "bnb_4bit_use_double_quant": double}


_CONFIGS: dict[str, Callable[[Traits], dict[str, Any] | None]] = {
    "unquantized": lambda traits: None,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "bnb_nf4": _bnb,
    "bnb_fp4": _bnb,
}


class LoaderChecks:
    """The checks of a loader for one case: `suite`, a `LoaderSuite`; `case`; `folder` of its files."""

    def __init__(self, suite: Any, case: ConformanceCase, folder: Path) -> None:
        self.suite, self.case, self.folder = suite, case, folder
        self.layers = make_layers(case)
        self.tensors = {key: t for name, layer in self.layers.items() for key, t in layer.named(name).items()}

    def shares_are_exact(self) -> None:
        """The shares of one file are exact."""
        self._check_shares(self._write("whole", self.tensors))

    def several_files_are_one(self) -> None:
        """The shares of three files are exact."""
        self._check_shares(self._write("several", self.tensors, 3))

    def cut_short_is_refused(self) -> dict[str, str]:
        """A file without its last byte is refused."""
        (file,) = self._write("cut-short", self.tensors)
        file.write_bytes(file.read_bytes()[:-1])
        return self._check_refusal([file], "a file without its last byte")

    def scales_missing_is_refused(self) -> dict[str, str]:
        """Files without a required tensor are refused."""
        name = self._scales_name()
        rest = {key: tensor for key, tensor in self.tensors.items() if key != name}
        return self._check_refusal(self._write("missing", rest), f"files without {name}")

    def wrong_shape_is_refused(self) -> dict[str, str]:
        """A tensor with a row less is refused."""
        name = self._scales_name()
        shape = self.tensors[name].shape
        if not shape or shape[0] < 2:
            pytest.skip(f"{name} has no second row")
        short = {**self.tensors, name: self.tensors[name][1:]}
        return self._check_refusal(self._write("shape", short), f"{name} without its first row")

    def _scales_name(self) -> str:
        """The full name of the first layer's scales, or of a tensor in their place."""
        prefix, layer = next(iter(self.layers.items()))
        for name in ("scales", "weight_scale", "absmax", "qweight", "weight"):
            if name in layer.tensors:
                suffix = {s.name: s.suffix for s in layer.weight_type.tensors(layer.config)}[name]
                return named(prefix, suffix)
        raise AssertionError(f"{layer} has no tensor of a known name")

    def _write(self, name: str, tensors: dict[str, Tensor], files: int = 1) -> list[Path]:
        return write_checkpoint(self.folder / f"{name}-{self.case.id}", tensors, self.case, files)

    def _check_refusal(self, files: list[Path], damage: str) -> dict[str, str]:
        """Check that damaged files raise an error, and undamaged ones do not; return the error."""
        if self.case.world != 1:
            pytest.skip("damage is shown to one rank")
        self.suite.load(self._write("sound", self.tensors), 0, 1)
        refusal = self._refusal(files, 0, 1)
        assert refusal, f"{damage} was loaded, and an error was due"
        return {"refused with": refusal}

    def _refusal(self, files: list[Path], rank: int, world: int) -> str:
        """The error of the loader, or ""; running out of memory is no refusal."""
        try:
            self.suite.load(files, rank, world)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # of any class, as the loader is not qload's
            first, *_ = str(error).splitlines() or [""]
            return f"{type(error).__name__}: {first}"
        return ""

    def _check_shares(self, files: list[Path]) -> None:
        """Check the share of every rank, or that every rank is refused an impossible split."""
        for rank in FakeWorld(self.case.world):
            prefix = f"rank {rank.rank()} of {self.case.world}: "
            want = self._expected(rank)
            if isinstance(want, str):
                refusal = self._refusal(files, rank.rank(), self.case.world)
                assert refusal, f"{prefix}it was loaded, and no such cut exists: {want}"
                continue
            got = self.suite.load(files, rank.rank(), self.case.world)
            assert isinstance(got, Mapping), (
                f"{prefix}load returned {type(got).__name__}, expected tensors by name"
            )
            self._check_tensors(dict(got), want, prefix)

    def _check_tensors(self, got: dict[str, Any], want: dict[str, Tensor], prefix: str) -> None:
        missing = sorted(set(want) - set(got))
        assert not missing, (
            f"{prefix}{len(missing)} of {len(want)} tensors are missing, the first {missing[0]}"
        )
        for name, tensor in want.items():
            with checks.error_prefix(f"{prefix}{name}: "):
                loaded = got[name]
                same = (loaded.dtype, tuple(loaded.shape)) == (tensor.dtype, tuple(tensor.shape))
                assert same, (
                    f"{loaded.dtype}, {tuple(loaded.shape)}; expected {tensor.dtype}, {tuple(tensor.shape)}"
                    f"{self._other_rank(name, loaded)}"
                )
                if not torch.equal(_bytes(loaded.cpu()), _bytes(tensor)):
                    other = self._other_rank(name, loaded)
                    with checks.error_prefix(f"{other.removeprefix(', ')}: " if other else ""):
                        checks.assert_same_bits(loaded.cpu(), tensor)

    def _other_rank(self, name: str, loaded: Tensor) -> str:
        """Describe the share of another rank that equals the loaded tensor; "" for none."""
        for rank in FakeWorld(self.case.world):
            want = self._expected(rank)
            if not isinstance(want, str) and torch.equal(_bytes(loaded.cpu()), _bytes(want[name])):
                return f", the share of rank {rank.rank()}"
        return ", the whole tensor" if loaded.shape == self.tensors[name].shape else ""

    def _expected(self, group: Any) -> dict[str, Tensor] | str:
        """The tensors of a rank by full name, or the reason why there is no such split."""
        expected: dict[str, Tensor] = {}
        for names, load in LOADS:
            for name in names:
                layer = self.layers[name]
                weights = Weights(layer.storage(name), loader=layer.loader(), process_group=group)
                try:
                    share = load(weights, name)
                except (CutError, DivideError) as error:
                    return str(error).splitlines()[0]
                expected |= name_tensors(share, name)
        return expected


def name_tensors(weight: Weight, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a typed `weight` by full name, for a layer called `prefix`."""
    suffixes = {spec.name: spec.suffix for spec in type(weight).tensors(weight.config)}
    return {named(prefix, suffixes[field]): tensor for field, tensor in weight.fields().items()}


def _bytes(tensor: Tensor) -> Tensor:
    return dense(tensor.reshape(-1)).view(torch.uint8)
