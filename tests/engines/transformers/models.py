"""Tiny random models as checkpoints in a format, and plain ones of what they mean, both of transformers."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from qload.engines import transformers as engine
from tests.models.with_transformers import theirs
from tests.models.with_transformers.asked import IDS
from tests.models.with_transformers.formats import Quantized, built
from tests.verify.damage.model import Model

RANGE = 1e-5  # of the logits: sums of float32 in another order
EAGER = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Stored:
    """A checkpoint `path`, a folder with the plain model that it means, and the model's class."""

    path: Path
    means: Path
    model_class: Any = theirs.AutoModelForCausalLM

    def load(self, **options: Any) -> Any:
        """The model on qload, its inputs as they come, in float32."""
        said = {"dtype": torch.float32, "activations": "unquantized", **EAGER, **options}
        return engine.load(self.path, **said)

    def plain(self) -> Any:
        """The model that it means."""
        options = {"dtype": torch.float32, "experts_implementation": "eager", **EAGER}
        return self.model_class.from_pretrained(self.means, **options).eval()


def stored(kind: str, name: str, folder: Path, **said: Any) -> Stored:
    """A random model of a type, whose layers are stored in a format; `said`: other sizes."""
    model: Quantized = built(kind, name, folder, **said)
    Model(model.tensors, model.config).write(folder / "stored")
    return Stored(folder / "stored", model.means)


@cache
def shared(kind: str, name: str, **said: Any) -> Stored:
    """The same, made once in a process, for who changes nothing of it."""
    return stored(kind, name, Path(mkdtemp(prefix="qload-engine-")), **said)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(ids.long()).logits
    return made


def greedy(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    """The tokens that follow, the likeliest each."""
    asked = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    made: Tensor = model.generate(ids, **asked)
    return made


def of_kind(model: nn.Module, kind: type[Any]) -> dict[str, Any]:
    """The modules of a class by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}
