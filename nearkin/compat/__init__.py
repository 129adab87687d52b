"""Names of other libraries on our core: code that was written for them runs with its imports changed."""

__all__: list[str] = []


def __getattr__(name: str) -> object:
    raise AttributeError(f"module 'nearkin.compat' has no attribute {name!r}. Import nearkin.compat.pml.")
