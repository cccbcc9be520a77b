"""The version of the package. Imports nothing, so that every layer may import it."""

__version__ = "0.1.0"
