"""Whether a model can read a prompt and write after it, told before anything is run."""

from collections.abc import Sequence

from qload.errors import ArgumentError, checked


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """ArgumentError for one of `ids` that is outside of a vocabulary of `vocab`."""
    wrong = next((each for each in ids if not 0 <= each < vocab), None)
    if wrong is not None:
        raise ArgumentError("ids", f"ids of a vocabulary of {vocab}: 0 to {vocab - 1}", str(wrong))


@checked
def check_prompt(
    prompt_ids: Sequence[int], tokens: int, vocab: int, max_tokens: int, longest: int | None = None
) -> None:
    """ArgumentError unless a model can read the prompt and write so many tokens after it.

    Parameters
    ----------
    prompt_ids, tokens
        The ids, at least one, and how many are to follow.
    vocab
        How many ids there are.
    max_tokens
        How many tokens a sequence may have.
    longest
        How many of them its prompt may have; None: all.
    """
    check_ids(prompt_ids, vocab)
    most = max_tokens if longest is None else min(max_tokens, longest)
    if not 1 <= len(prompt_ids) <= most:
        raise ArgumentError("prompt_ids", f"1 to {most} ids", f"{len(prompt_ids)} ids")
    if tokens < 0 or len(prompt_ids) + tokens > max_tokens:
        most = max_tokens - len(prompt_ids)
        raise ArgumentError("tokens", f"0 to {most} after a prompt of {len(prompt_ids)}", str(tokens))
