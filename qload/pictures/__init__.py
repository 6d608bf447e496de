"""Reports as pages of HTML, and drawings of layouts from their sentences."""

from qload.pictures.drawing import LAYOUTS, drawing, words_of
from qload.pictures.histograms import layer_pictures
from qload.pictures.html_pages import explanation_page, report_page

__all__ = ["LAYOUTS", "drawing", "explanation_page", "layer_pictures", "report_page", "words_of"]
