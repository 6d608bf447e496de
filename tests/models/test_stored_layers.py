"""How ranks share what stands at both ends of a model."""

from torch import Tensor

from qload.models import load_model
from qload.parallel import Collectives, FakeWorld
from tests.models.drawn import config, tensors, weights
from tests.models.recorded import logits, off
from tests.models.test_loading import IDS, RANGE


def test_a_vocabulary_that_ranks_do_not_divide_has_a_head_of_its_own_too() -> None:
    said = config("llama", tie_word_embeddings=False, vocab_size=37)
    stored = tensors(said)
    want = logits(load_model(weights(said, stored), said), IDS)

    def work(group: Collectives) -> Tensor:
        return logits(load_model(weights(said, stored, group), said), IDS, ranks=group.size())

    assert all(off(got, want) < RANGE for got in FakeWorld(2).run(work))
