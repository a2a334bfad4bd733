"""Boxes in images: non-maximum suppression."""
