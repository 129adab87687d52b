"""Names of other libraries on our core: code that was written for them runs with its imports changed."""

__all__: list[str] = []
