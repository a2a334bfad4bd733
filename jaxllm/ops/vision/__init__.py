"""Bounding boxes in images: non-maximum suppression."""
