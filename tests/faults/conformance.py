"""Faults of the checks and the suites: elements and cases that are skipped or misplaced."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "same-inputs-read-back-twice",
        "qload/testing/checks.py",
        ".roll(start, 1)\n",
        ".roll(0, 1)\n",
    ),
    Fault("poison-is-zero", "qload/testing/checks.py", "POISON = 0xFF ", "POISON = 0x00 "),
    Fault(
        "writes-beyond-not-seen",
        "qload/testing/checks.py",
        "            wrong = (memory != before).nonzero().flatten()\n",
        "            wrong = (memory != memory).nonzero().flatten()\n",
    ),
    Fault(
        "partial-sums-cost-nothing",
        "qload/testing/checks.py",
        "        if dtype != torch.float32:\n",
        "        if dtype == torch.bfloat16:\n",
    ),
    Fault(
        "common-layers-wrap",
        "qload/testing/layer_factory.py",
        '        least = 0 if traits.zeros in ("v2", "wrapping") else 1\n',
        "        least = 0\n",
    ),
    Fault(
        "common-layers-are-asymmetric",
        "qload/testing/layer_factory.py",
        "    if traits.symmetric:\n        zeros = torch.full(",
        "    if traits.symmetric and not config.positional:\n        zeros = torch.full(",
    ),
    Fault(
        "act-order-not-in-the-name",
        "qload/testing/traits.py",
        '            "actorder" if self.act_order else "",\n',
        "",
    ),
    Fault(
        "refused-cases-run",
        "qload/conformance/suites.py",
        "        if not supported:\n            pytest.skip(",
        "        if not reason:\n            pytest.skip(",
    ),
    Fault(
        "one-rank-on-trial",
        "qload/conformance/linear_checks.py",
        'process_group=rank), "layer")\n        for rank in FakeWorld(case.world)\n',
        'process_group=rank), "layer")\n        for rank in [*FakeWorld(case.world)][:1]\n',
    ),
    Fault(
        "few-tokens-alone",
        "qload/conformance/linear_checks.py",
        "                    checks.assert_are_sums(kernel, x[:M], want[:M], weight)\n",
        "                    checks.assert_are_sums(kernel, x[:1], want[:1], weight)\n",
    ),
    Fault(
        "loaders-may-cast",
        "qload/conformance/loader_checks.py",
        "        for name, tensor in want.items():\n            with checks.error_prefix(",
        "        for name, tensor in list(want.items())[:0]:\n            with checks.error_prefix(",
    ),
    Fault(
        "any-damage-will-do",
        "qload/conformance/loader_checks.py",
        "        refusal = self._refusal(files, 0, 1)\n",
        "        refusal = self._refusal(files[:0], 0, 1)\n",
    ),
    Fault(
        "columns-move-with-rows",
        "qload/testing/snapshots.py",
        'f"columns {_bands(bytes_.transpose(0, 1))}"',
        'f"columns {_bands(bytes_)}"',
    ),
)
