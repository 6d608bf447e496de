from .report import Finding as Finding
from .report import Prompt as Prompt
from .report import Report as Report
from .verification import inspect as inspect
from .verification import verify as verify
