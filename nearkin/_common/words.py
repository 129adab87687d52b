"""Numbers with their nouns, and titles that agree with a number."""

import re
from collections.abc import Sequence

_SINGULAR = {"are": "is", "have": "has", "differ": "differs", "do": "does", "were": "was"}


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, given in the singular: "1 image", "1,234 classes", "0 files"."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def joined(names: Sequence[str]) -> str:
    """List names: "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def agreeing(number: int, phrase: str) -> str:
    """Write a number with a phrase that starts with a plural noun, in the singular for 1: "1 class has no image"."""
    if number == 1:
        phrase = re.sub(r"\b(class)es\b|\b(\w+)s\b", r"\1\2", phrase, count=1)
        phrase = re.sub(rf"\b({'|'.join(_SINGULAR)})\b", lambda verb: _SINGULAR[verb[0]], phrase, count=1)
    return f"{number:,} {phrase}"


def printable(text: str) -> str:
    """Escape bytes of file names that are not UTF-8, for example as \\udce9, which JSON decodes to the same name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
