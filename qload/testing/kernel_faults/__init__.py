"""What a wrong packer or kernel does, as changes of a weight's tensors and of a product's operands."""

from qload.testing.kernel_faults.fault import KernelFault
from qload.testing.kernel_faults.products import FAULTS as PRODUCTS
from qload.testing.kernel_faults.tensors import FAULTS as TENSORS

KERNEL_FAULTS: tuple[KernelFault, ...] = (*TENSORS, *PRODUCTS)

__all__ = ["KERNEL_FAULTS", "KernelFault"]
