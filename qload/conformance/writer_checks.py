"""The checks of `WriterSuite`: the tensors of a quantizer against the weight that it computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.diagnosis import diagnose
from qload.spec import Weight
from qload.testing import checks
from qload.testing.layer_factory import layer_of


class WriterChecks:
    """The checks of a quantizer for one case: `suite`, a `WriterSuite`, and `case`."""

    def __init__(self, suite: Any, case: ConformanceCase) -> None:
        if case.world > 1:
            pytest.skip("a quantizer writes whole layers")
        self.suite, self.case = suite, case

    def writes_what_it_means(self) -> None:
        """The dequantized tensors equal the weight of the quantizer, or the fault is named."""
        tensors, meant = self._write(self._floats())
        weight = self._typed(dict(tensors))
        got = weight.dequantize()
        assert tuple(got.shape) == tuple(meant.shape), (
            f"the tensors have the shape {tuple(got.shape)}, the weight {tuple(meant.shape)}"
        )
        diagnosis = diagnose(got, meant.to(got.device), weight)
        if diagnosis.wrong:
            n, k = (got != meant.to(got.dtype)).nonzero()[0].tolist()
            text = f"at (n, k) = ({n}, {k}) the tensors mean {got[n, k]:g}, the quantizer {meant[n, k]:g}"
            raise checks.WrongProduct(text, diagnosis)

    def the_weight_is_left_alone(self) -> None:
        """Quantizing does not write to its argument."""
        given = self._floats()
        before = given.clone()
        self._write(given)
        with checks.error_prefix("quantizing changes the weight: "):
            checks.assert_same_bits(given, before)

    def _write(self, weight: Tensor) -> tuple[Any, Tensor]:
        answer: Any = self.suite.write(weight, self.case)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise AssertionError("write returns no pair of tensors by field and their meaning")
        return answer

    def _typed(self, tensors: dict[str, Tensor]) -> Weight:
        layer = layer_of(self.case.traits, self.case.N, self.case.K)
        unknown = sorted({*tensors} - {*layer.tensors})
        assert not unknown, f"{unknown[0]} is no tensor of {self.case.format}: {', '.join(layer.tensors)}"
        for name, tensor in layer.tensors.items():
            if name in tensors:
                want, got = ((each.dtype, tuple(each.shape)) for each in (tensor, tensors[name]))
                assert got == want, f"{name}: {got[0]}, {got[1]}; expected {want[0]}, {want[1]}"
            else:
                assert name in self.suite.optional, f"{name} is missing"
                tensors[name] = tensor
        fields: dict[str, Any] = {"config": layer.config, **tensors}
        return layer.weight_type(**fields)

    def _floats(self) -> Tensor:
        """Normal numbers (N, K) of the size of a model's, in the dtype of the case."""
        seed = 1000 * self.case.K + self.case.N
        drawn = torch.randn(self.case.N, self.case.K, generator=torch.Generator().manual_seed(seed)) / 32
        return drawn.to(getattr(torch, self.case.dtype))
