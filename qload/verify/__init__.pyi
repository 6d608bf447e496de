from .examine import inspect as inspect
from .examine import verify as verify
from .prompt import Prompt as Prompt
from .report import Finding as Finding
from .report import Report as Report
