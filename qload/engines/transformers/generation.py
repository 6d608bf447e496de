"""Text generation by transformers' own classes, with linears and experts of qload.

For types of model without a decoder of qload. transformers keeps the state of a sequence (keys and values, or
the state of a recurrent layer) and continues it; the next id is chosen by a `Sampler` of qload.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from qload.detect.config_reader import MODEL_CONFIG
from qload.engines.model_types import ModelSizes
from qload.engines.transformers.loading import load
from qload.errors import ConfigError, QloadError, check_type
from qload.loader.source import Nonfinite
from qload.models.generation import GREEDY, Sampler, check_finite, check_prompt
from qload.models.memory import tensor_bytes
from qload.parallel import ALONE, ProcessGroup, collectives_of

PROGRAM = f"transformers {transformers.__version__}"
MAX_POSITIONS = 1 << 31  # of a model without a limit


def read_sizes(path: str | PathLike[str], model_type: str) -> ModelSizes | None:
    """Read the sizes of the model at `path`; None for a `model_type` that transformers does not know.

    ConfigError for a config that transformers refuses, and for sizes that are not numbers.
    """
    if model_type not in transformers.CONFIG_MAPPING:
        return None
    place = Path(path)
    with refusals_as_config_error(model_type):
        folder = place if place.is_dir() else place.parent
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config(decoder=True)
        sizes = (text.num_hidden_layers, text.hidden_size, text.vocab_size)
        for size in sizes:
            check_type("config", size, int)
        positions = getattr(text, "max_position_embeddings", None) or MAX_POSITIONS
        check_type("max_position_embeddings", positions, int)
        positions = positions if positions > 0 else MAX_POSITIONS  # XLNet says -1
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return ModelSizes(model_type, PROGRAM, *sizes, positions, dtype)


@contextmanager
def refusals_as_config_error(model_type: str) -> Iterator[None]:
    """Convert transformers' errors about a model to ConfigError; qload's own errors pass."""
    try:
        yield
    except QloadError:
        raise
    except Exception as error:  # transformers and its models raise errors of any class
        expected = f"a model that {PROGRAM} runs"
        got = f"{model_type}: {type(error).__name__}: {error!s:.300}"
        raise ConfigError(MODEL_CONFIG, "model_type", expected, got) from error


class TransformersModel:
    """Model of transformers with layers of qload, for one sequence at a time.

    Under several ranks each has its share of the model, by transformers' plan for it, and makes the same
    calls; ids are chosen by rank 0.

    Parameters
    ----------
    model
        Result of `load`.
    sizes
        Its sizes, by `read_sizes`.
    process_group
        The ranks.
    """

    def __init__(self, model: Any, sizes: ModelSizes, process_group: ProcessGroup = ALONE) -> None:
        self.model: Any = model.eval()
        self.sizes: ModelSizes = sizes
        self._ranks = collectives_of(process_group)
        ends = model.generation_config.eos_token_id
        self._eos: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
        model.generation_config = GenerationConfig()  # whose defaults change no logits

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        sizes: ModelSizes,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        process_group: ProcessGroup = ALONE,
        nonfinite: Nonfinite = "error",
    ) -> "TransformersModel":
        """Load the model of a checkpoint, or this rank's share; errors as of `load`, and ConfigError."""
        parallel = process_group.size() > 1
        with refusals_as_config_error(sizes.type):
            model = load(
                path,
                dtype=dtype,
                device_map=None if parallel else str(device),
                tp_plan="auto" if parallel else None,
                nonfinite=nonfinite,
            )
        return cls(model, sizes, process_group)

    @property
    def bytes(self) -> int:
        """Bytes of the weights that a token needs: all but the embedding, unless it is the head."""
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        tied = head is not None and getattr(head, "weight", None) is embedding.weight
        return tensor_bytes(self.model) - (0 if tied else tensor_bytes(embedding))

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Compute the logits (1, vocab) after a prompt `ids`."""
        with refusals_as_config_error(self.sizes.type):
            logits: Tensor = self.model(input_ids=self._inputs(ids), use_cache=False).logits
        return logits[:, -1]

    def generate(
        self,
        ids: Sequence[int],
        tokens: int,
        sampler: Sampler = GREEDY,
        report: Callable[[int], None] = lambda token: None,
    ) -> list[int]:
        """Generate up to `tokens` ids after the prompt `ids`, and `report` each as soon as it is chosen.

        ArgumentError for ids outside of the vocabulary, for more tokens than positions, and for logits that
        are not finite.
        """
        check_prompt(ids, tokens, self.sizes.vocab, self.sizes.positions)
        if not tokens:
            return []
        inputs = self._inputs(ids)
        chosen = ChosenIds(sampler, self.model.dtype, self._ranks.first, report)
        config = GenerationConfig(
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=self._eos or None,
            pad_token_id=self._eos[0] if self._eos else 0,
        )
        with refusals_as_config_error(self.sizes.type):
            self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                logits_processor=LogitsProcessorList([chosen]),
            )
        return chosen.ids

    def _inputs(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([[*ids]], device=self.model.device)


class ChosenIds(LogitsProcessor):  # type: ignore[misc]
    """Choice of each next id by a `sampler`, in place of transformers' own.

    Parameters
    ----------
    sampler
        Chooses from logits.
    dtype
        Dtype of the model, for the error about logits that are not finite.
    agree
        Returns the ids of rank 0.
    report
        Called with each id.
    """

    def __init__(
        self,
        sampler: Sampler,
        dtype: torch.dtype,
        agree: Callable[[Tensor], Tensor],
        report: Callable[[int], None],
    ) -> None:
        self.ids: list[int] = []
        self._sampler, self._dtype, self._agree, self._report = sampler, dtype, agree, report
        self._numbers = sampler.numbers(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores (1, vocab) in which only the chosen id is finite; `input_ids` (1, T) are not used."""
        numbers = torch.tensor([next(self._numbers)], dtype=torch.float64, device=scores.device)
        ids = self._agree(self._sampler.choose(scores, numbers))
        check_finite(ids.tolist(), self._dtype)
        self.ids.append(int(ids))
        self._report(self.ids[-1])
        return torch.full_like(scores, -torch.inf).scatter(1, ids[:, None], 0.0)
