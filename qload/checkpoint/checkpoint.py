"""`Checkpoint`: files, configs, architecture and layers of a checkpoint; `open_checkpoint`: its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any, Self

from qload.architecture import Architecture, read_architecture
from qload.checkpoint.coverage import Account, account
from qload.checkpoint.layer_index import LayerIndex
from qload.configs import Claims, FoundConfig
from qload.detect import (
    KernelTarget,
    Target,
    compare_configs,
    effective_claims,
    for_target,
    loader_from_claims,
    read_configs,
    read_model_config,
)
from qload.detect.gguf import (
    ROPE_FACTORS,
    config_of_keys,
    found_config,
    name_tensors,
    scaling_of_factors,
    unknown_architecture,
)
from qload.errors import QloadError, checked
from qload.experts import ExpertStacks
from qload.experts.stack_layouts import StackOrders
from qload.experts.stacked_storage import split_stacks
from qload.lazy_torch import torch
from qload.loader import FormatLoader, LayerDescription, WeightsLoader
from qload.loader.source import Nonfinite
from qload.parallel import ProcessGroup
from qload.spec import Role, TensorSpec
from qload.storage import (
    COMFY_METADATA,
    CheckpointFiles,
    ComfyStorage,
    GGUFStorage,
    SafetensorsStorage,
    WeightStorage,
    locate,
    read_marks,
    snapshot,
    validate_gguf,
    validate_headers,
)
from qload.storage.gguf import model_keys, tensors_of
from qload.weights import Weights
from qload.weights.weights import HeaderWeights

log: logging.Logger = logging.getLogger("qload")


class Checkpoint:
    """A checkpoint opened by its headers and configs; no weight is read.

    `open` raises the first error, or collects all of them for a report. Closed by `close`, or as a context
    manager.

    Attributes
    ----------
    path, location
        Its name in reports, and its path: of a folder of the hub's cache, that of the snapshot.
    errors
        Reasons why it cannot be read; empty if errors are raised.
    notes
        Remarks on files and configs.
    is_shard
        True for one file of several.
    model_config
        The model's config.json; empty without one.
    configs
        Quantization configs, in order of precedence; loads follow the first.
    claims
        Claims of the first config and of setting tensors; None for plain weights.
    architecture
        Tensors of the model by config.json; None for an unknown type of model.
    settled
        True if layers are described as loads do it, by their values too.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: str = str(path)
        self.location: str | PathLike[str] = path
        self.settled: bool = True
        self.errors: list[QloadError] = []
        self.notes: list[str] = []
        self.is_shard: bool = False
        self.model_config: Mapping[str, Any] = {}
        self.configs: list[FoundConfig] = []
        self.claims: Claims | None = None
        self.architecture: Architecture | None = None
        self._collects = False
        self._storage: WeightStorage | None = None
        self._loader: FormatLoader | None = None
        self._stack_orders: StackOrders | None = None

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        collect: bool = False,
        settled: bool = True,
        loader: FormatLoader | None = None,
        stack_orders: StackOrders | None = None,
    ) -> Self:
        """Open the checkpoint at a path.

        `collect`: keep errors in `errors` in place of raising the first one. Rules then report contradictions
        of layers and scales that are not finite, and loads do not raise them.
        `loader`: loader of the layers; the quantization configs are not read then. None: that of the configs.
        `stack_orders`: orders of stacked experts that a model's class knows.
        """
        checkpoint = cls(path)
        checkpoint.settled, checkpoint._collects, checkpoint._loader = settled, collect, loader
        checkpoint._stack_orders = stack_orders
        try:
            checkpoint._open()
        except QloadError as error:
            if not collect:
                checkpoint.close()
                raise
            checkpoint.errors.append(error)
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        if self._storage is not None:
            self._storage.close()

    @property
    def is_readable(self) -> bool:
        """True if it has weights and no errors."""
        return self._loader is not None and not self.errors

    @property
    def storage(self) -> WeightStorage:
        """Tensors by name; experts of a stack as tensors of their own."""
        assert self._storage is not None
        return self._storage

    @property
    def loader(self) -> FormatLoader:
        """Loader of the config's formats, without repacking."""
        assert self._loader is not None
        return self._loader

    def weights_for(self, *, loader: WeightsLoader | None = None, **options: Any) -> Weights:
        """Tensors for one rank; `loader` None: that of the config. `options`: parameters of `Weights`."""
        kind = Weights if self.settled else HeaderWeights
        return kind(self.storage, loader=loader or self.loader, architecture=self.architecture, **options)

    @cached_property
    def weights(self) -> Weights:
        """Tensors as stored, for one rank on the CPU; for descriptions alone unless `settled`."""
        return self.weights_for(nonfinite="allow" if self._collects else "error")

    @cached_property
    def index(self) -> LayerIndex:
        """Tensors by layer; each layer is described once."""
        return LayerIndex(self.weights, settled=self.settled)

    @cached_property
    def account(self) -> Account:
        """Explanation of each tensor, and the explained share of the bytes."""
        return account(self.index)

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Prefix -> description of a layer, or the error of the loader."""
        return self.index.layers

    def described(self) -> Iterator[LayerDescription]:
        """Yield the layers that could be described."""
        return (layer for layer in self.layers.values() if not isinstance(layer, QloadError))

    @cached_property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return self.index.names

    @property
    def suffixes(self) -> Mapping[str, list[str]]:
        """Prefix -> the suffixes of the names under it."""
        return self.index.suffixes

    @property
    def prefixes(self) -> Mapping[str, str]:
        """Tensor name -> its prefix."""
        return self.index.prefixes

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Tensor name -> its declaration, for tensors of described layers."""
        return self.index.specs

    @property
    def unread(self) -> Mapping[str, str]:
        """Tensors that no format reads, with the reason."""
        return self.account.report.unread

    def role(self, name: str) -> Role:
        """Return the role of a tensor by the declaration of its layer, or by its name."""
        return self.index.role(name)

    def _open(self) -> None:
        self.location = snapshot(self.location)
        self.path = str(self.location)
        located = locate(self.location)
        self.is_shard = located.shard
        storage = self._open_gguf(located) if located.is_gguf else self._open_safetensors(located)
        config = self.configs[0] if self.configs else None
        if storage is None:  # the config can still be wrong, but there is nothing to open
            effective_claims(config, None)
            return
        self._storage = storage
        self.architecture = read_architecture(self.model_config)
        self._storage = split_stacks(self._storage, self.model_config, self._stack_orders)
        if self._collects and isinstance(self._storage, ExpertStacks) and self._storage.stacks:
            self.notes.append(self._storage.note())  # logged by the storage otherwise
        loader = self._loader or self._loader_of_configs(config, self._storage)
        self._loader = loader.for_rules() if self._collects else loader
        if not self._collects:
            for note in self.notes:
                log.info("%s", note)

    def _open_safetensors(self, located: CheckpointFiles) -> SafetensorsStorage | None:
        """Check headers and read configs; None after an error."""
        headers = validate_headers(located, self._refuse, self.notes.append)
        if self._loader is None:
            self.model_config, self.configs = read_configs(self.location)
        else:
            self.model_config = read_model_config(self.location)
        if self.errors:
            return None
        storage = SafetensorsStorage(located, headers=headers)
        marks = {} if self.configs or self._loader is not None else read_marks(storage)
        if not marks:
            return storage
        storage.close()
        values = {"quant_method": "comfyui", "layers": marks}
        self.configs = [FoundConfig(next(iter(headers)), COMFY_METADATA, values)]
        return ComfyStorage(located, headers=headers, marks=marks)

    def _open_gguf(self, located: CheckpointFiles) -> GGUFStorage | None:
        """Check headers, and name tensors by the architecture; None after an error."""
        headers = validate_gguf(located, self._refuse, self.notes.append)
        if self.errors:
            return None
        keys, tensors = model_keys(headers), tensors_of(headers)
        file = next(iter(headers))
        self.configs = [found_config(file, keys)]
        storage = GGUFStorage(located, headers=headers, views=name_tensors(keys, tensors, file))
        self.model_config = config_of_keys(keys, tensors)
        if ROPE_FACTORS in tensors:
            scaling = scaling_of_factors(storage.read_array(ROPE_FACTORS), self.model_config)
            self.model_config = {**self.model_config, "rope_scaling": scaling}
        if note := unknown_architecture(keys):
            self.notes.append(note)
        return storage

    def _loader_of_configs(self, config: FoundConfig | None, storage: WeightStorage) -> FormatLoader:
        """Loader of the first config, compared with all others."""
        self.claims = effective_claims(config, storage, self.model_config)
        loader = loader_from_claims(self.claims, config, storage)
        if ROPE_FACTORS in storage.keys() and self._has_rope_scaling:  # noqa: SIM118
            loader.config_tensors += (ROPE_FACTORS,)
        if self.claims is not None:
            self.notes += self.claims.notes
            for conflict in compare_configs(self.configs, self.claims, storage):
                if isinstance(conflict, QloadError):
                    self._refuse(conflict)
                else:
                    self.notes.append(conflict)
        return loader

    @property
    def _has_rope_scaling(self) -> bool:
        """Return whether config.json states a known scaling of rope."""
        scaling = self.model_config.get("rope_scaling")
        return isinstance(scaling, dict) and scaling.get("rope_type") != ROPE_FACTORS

    def _refuse(self, error: QloadError) -> None:
        if not self._collects:
            raise error
        self.errors.append(error)


@checked
def open_checkpoint(
    path: str | PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    prefix: str | None = None,
    target: Target | None = None,
    nonfinite: Nonfinite = "error",
) -> Weights:
    """Open a safetensors or GGUF file, a directory or a sharded index as `Weights`.

    Use it as a context manager, which closes the files. The config beside the files determines the loader.

    Parameters
    ----------
    path
        A safetensors file, a GGUF file, a directory, or an index.
    device
        Device of the loaded tensors.
    dtype
        Type of plain floats after the load; None keeps the stored type. Packed words, indices, scales,
        integers and float8 are never cast. An overflowing cast raises `CastError`.
    process_group
        An object with `rank()` and `size()`, such as a group of torch.distributed; None is one rank.
    aliases
        Other names of a tensor: `{"lm_head.weight": ["model.embed_tokens.weight"]}`.
    prefix
        A prefix to try before a name that is not stored.
    target
        Order of the loaded weights in memory: "auto" (the fastest kernels of the device), "marlin",
        "strips", "panels", "exllama", or a `KernelTarget`; None keeps the stored order. A weight that the
        order cannot hold keeps its own, with a note in `Weights.report()`. "marlin" repacks FP8 and FP4
        for a `dtype` of float16 or bfloat16; "auto" repacks them only for a `KernelTarget` with a dtype.
    nonfinite
        "error" refuses a layer with a scale that is NaN or infinite, by `NonfiniteScaleError` on all ranks;
        "allow" loads such scales as stored.

    Raises
    ------
    StorageError
        Where a file is not a checkpoint that can be trusted.
    ConfigError, UnsupportedFormatError
        Where the config is malformed, or of a method that is not read.

    Examples
    --------
    >>> import os, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> from qload import open_checkpoint
    >>> folder = tempfile.TemporaryDirectory()
    >>> save_file({"up.weight": torch.ones(4, 2)}, os.path.join(folder.name, "model.safetensors"))
    >>> with open_checkpoint(folder.name) as weights:
    ...     weights.get_weights("up")
    UnquantizedWeight(up, (4, 2), UnquantizedConfig(axes=2), weight=(4, 2))
    >>> folder.cleanup()
    """
    checkpoint = Checkpoint.open(path)
    try:
        return checkpoint.weights_for(
            loader=for_target(checkpoint.loader, target_of_dtype(target, dtype) if dtype else target),
            device=device,
            dtype=dtype,
            process_group=process_group,
            aliases=aliases,
            prefix=prefix,
            nonfinite=nonfinite,
        )
    except BaseException:
        checkpoint.close()
        raise


def target_of_dtype(target: Target | None, dtype: torch.dtype | None) -> Target | None:
    """Return the target; one for Marlin's kernel without a dtype gets the `dtype` of activations."""
    if target is None or dtype not in (torch.float16, torch.bfloat16):
        return target
    options = target if isinstance(target, KernelTarget) else KernelTarget(target)
    return replace(options, dtype=dtype) if options.kernel == "marlin" and options.dtype is None else target


@contextmanager
def opened(
    path_or_weights: str | PathLike[str] | Weights,
) -> Iterator[tuple[Weights, Mapping[str, Any]]]:
    """Open the checkpoint at a path, or take weights, which stay open; yield weights and config.json."""
    if isinstance(path_or_weights, Weights):
        known = path_or_weights.architecture
        yield path_or_weights, {} if known is None else known.model_config
    else:
        with Checkpoint.open(path_or_weights) as checkpoint:
            yield checkpoint.weights, checkpoint.model_config
