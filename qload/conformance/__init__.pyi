from .cases import ConformanceCase as ConformanceCase
from .cases import cases as cases
from .suites import ExpertsKernelSuite as ExpertsKernelSuite
from .suites import LinearKernelSuite as LinearKernelSuite
from .suites import LoaderSuite as LoaderSuite
from .suites import PackerSuite as PackerSuite
from .suites import WriterSuite as WriterSuite
