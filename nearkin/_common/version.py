"""Package version, in a module without imports."""

__version__ = "0.2.0.dev0"
