"""Models that see: a vision tower and what connects it to a text, plain, whatever the text is stored as."""

from qload.models.vision.model import VisionModel, load_vision_model

__all__ = ["VisionModel", "load_vision_model"]
