"""Converts parameters to and from the file formats of other projects."""
