"""ExLlama's kernel order: within a word, the codes of even rows before those of odd rows.

One mask on a word, and on the word shifted, gives pairs of neighbouring rows, half a word apart.
8-bit words are those of GPTQ. Three words of 3 bits have 32 codes: word a has the codes
10a, 10a + 2, ... from bit 0 and 10a + 1, 10a + 3, ... from bit 16, and in its bits 15 and 31 the
bits a of codes 30 and 31. Source: exllamav2 b9c025b and vLLM 0.11.0, byte-equal to both.
"""

from functools import cache

from qload.layouts import gptq
from qload.layouts.packing import Packing
from qload.sentences import CodeField


@cache
def rows(bits: int) -> Packing:
    """Packing of codes (K, N), sorted by group, into shuffled words (K * bits / 32, N)."""
    if bits == 3:
        return Packing(3, "(kp i) n -> (kp w) n (i)", i=32, w=3, fields=_three_words())
    if bits == 8:
        return gptq.rows(8)
    return Packing(bits, "(kp j r) n -> kp n (r j)", r=2, j=16 // bits)


def _three_words() -> tuple[CodeField, ...]:
    unsplit = [
        CodeField(code=10 * word + 2 * i + odd, low=0, width=3, word=word, bit=16 * odd + 3 * i)
        for word in range(3)
        for i in range(5)
        for odd in range(2)
    ]
    split = [
        CodeField(code=30 + odd, low=word, width=1, word=word, bit=16 * odd + 15)
        for word in range(3)
        for odd in range(2)
    ]
    return tuple(unsplit + split)
