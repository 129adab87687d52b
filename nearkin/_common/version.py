"""Versions of this package and of others; imports nothing."""

__version__ = "0.2.0.dev0"


def installed_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
