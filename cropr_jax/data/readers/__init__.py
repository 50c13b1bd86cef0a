"""Data sets as they lie on disk, one kind a file."""
