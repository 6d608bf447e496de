"""Answers to look at: reports as one page of HTML, and layouts as drawings, made from their sentences."""

from qload.pictures.drawing import LAYOUTS, drawing, words_of
from qload.pictures.explanation import explanation_page
from qload.pictures.report import report_page
from qload.pictures.values import layer_pictures

__all__ = ["LAYOUTS", "drawing", "explanation_page", "layer_pictures", "report_page", "words_of"]
