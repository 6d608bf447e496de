from .case import Case as Case
from .cases import cases as cases
from .linear import LinearKernelSuite as LinearKernelSuite
