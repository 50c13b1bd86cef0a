"""The version of the package, read by the build and written beside every result."""

__version__ = "0.1.0"
