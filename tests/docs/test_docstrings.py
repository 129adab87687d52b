"""Public functions and classes document their arguments and results in Google style.

Methods need no sections: one line that says what it does is enough.
"""

import dataclasses
import inspect
import re

import pytest
from helpers.public_api import public_names

from nearkin.config import recipe

# Their fields carry one docstring each, which the command line shows as help.
FIELD_DOCSTRINGS = {recipe.Recipe, recipe.DataConfig, recipe.ModelConfig, recipe.TrainConfig}


def documented_objects() -> dict[str, object]:
    """Path -> object, for the public functions and classes and for the public methods of these classes."""
    found: dict[str, object] = {}
    for package, name, path in public_names():
        thing = getattr(__import__(package, fromlist=[name]), name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found[path] = thing
        if inspect.isclass(thing):
            for method, value in vars(thing).items():
                function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                if inspect.isfunction(function) and not method.startswith("_"):
                    found[f"{path}.{method}"] = function
    return found


OBJECTS = documented_objects()


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def returns_something(function) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None", inspect.Signature.empty)


def has_section(doc: str, *titles: str) -> bool:
    return any(re.search(rf"^{title}:$", doc, re.MULTILINE) for title in titles)


def missing(thing) -> list[str]:
    """Return the parts that the docstring lacks."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    if not doc:
        return ["docstring"]
    if inspect.isclass(thing):
        if thing in FIELD_DOCSTRINGS or issubclass(thing, Exception):
            return []
        own_init = vars(thing).get("__init__")
        needs = dataclasses.is_dataclass(thing) or (inspect.isfunction(own_init) and parameters(own_init))
        return ["Args or Attributes"] if needs and not has_section(doc, "Args", "Attributes") else []
    if "." in thing.__qualname__:
        return []
    lacks = []
    if parameters(thing) and not has_section(doc, "Args"):
        lacks.append("Args")
    if returns_something(thing) and not has_section(doc, "Returns", "Yields"):
        lacks.append("Returns")
    return lacks


@pytest.mark.parametrize("path", sorted(OBJECTS))
def test_docstring_is_complete(path):
    assert missing(OBJECTS[path]) == [], path
