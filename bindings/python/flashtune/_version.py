"""The version of this package; the library's major and minor must agree with it."""

__version__ = "0.1.0"
