"""What a checkpoint holds, layer by layer and byte by byte, before any weight of it is read."""

from qload.listing.answer import Answer, cause_of, make_report
from qload.listing.coverage import Account, Coverage, account, check_all_read
from qload.listing.groups import Groups
from qload.listing.info import LayerInfo, info_of
from qload.listing.layers import layers
from qload.listing.load import load_layers

__all__ = [
    "Account",
    "Answer",
    "Coverage",
    "Groups",
    "LayerInfo",
    "account",
    "cause_of",
    "check_all_read",
    "info_of",
    "layers",
    "load_layers",
    "make_report",
]
