"""Attention masks of a captured graph, recognised for what they are: a band, segments, padding."""

from xlatrain.bridge.capture.masks.recognise import recognise_masks

__all__ = ["recognise_masks"]
