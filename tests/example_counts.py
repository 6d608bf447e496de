"""How many examples tests of laws draw: in a run of all tests, of native code, and where faults are."""

from hypothesis import settings

FEW, SOME, MANY = 20, 50, 100  # of a test that says no number, by profile


def at_most(count: int) -> settings:
    """`count` examples; half as many in a run of all tests, which draws others each time it is run."""
    quick = settings.default.max_examples <= FEW
    return settings(max_examples=-(-count // 2) if quick else count)
