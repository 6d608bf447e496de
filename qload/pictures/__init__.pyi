from .drawing import LAYOUTS as LAYOUTS
from .drawing import drawing as drawing
from .drawing import words_of as words_of
from .histograms import layer_pictures as layer_pictures
from .html_pages import explanation_page as explanation_page
from .html_pages import report_page as report_page
