from .cases import ConformanceCase as ConformanceCase
from .cases import cases as cases
from .experts import ExpertsKernelSuite as ExpertsKernelSuite
from .linear import LinearKernelSuite as LinearKernelSuite
from .loader import LoaderSuite as LoaderSuite
from .packer import PackerSuite as PackerSuite
