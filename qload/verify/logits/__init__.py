"""`verify --logits`: does what multiplies by the weights of a model compute what these weights mean?"""

from qload.verify.logits.compared import check_logits

__all__ = ["check_logits"]
