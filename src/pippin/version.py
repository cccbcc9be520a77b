"""The version of the package, and of others; every layer may import it."""

from collections.abc import Iterable

__version__ = "0.1.0"


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """By name, of those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
