"""Modules whose settings are declared like the fields of a dataclass."""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Self, dataclass_transform

from torch import nn

from nearkin.errors import ConfigError


def is_ours(cls: type) -> bool:
    """Return whether a class is defined here, rather than by the user."""
    return cls.__module__.startswith("nearkin.compat.")


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class SettingsModule(nn.Module):
    """A module whose annotated attributes are its settings, with the order and the defaults of PML's arguments.

    Our subclasses are made dataclasses, which have their `__init__` from the attributes; those of users are not. In
    `class Name(Base, option=value)` an option is the class attribute `default_option` if there is one, else `option`.
    """

    _: KW_ONLY
    collect_stats: bool | None = None

    stored: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # setting -> what its attribute is, as in PML: radians

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        nn.Module.__init__(self)  # before the settings are set, some of which are modules
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__()
        for name, value in options.items():
            setattr(cls, f"default_{name}" if hasattr(cls, f"default_{name}") else name, value)
        if is_ours(cls):
            dataclass(eq=False, repr=False)(cls)
            for setting in fields(cls):  # a default in the class would hide a parameter or module of the same name
                if setting.init and setting.name in vars(cls):
                    delattr(cls, setting.name)

    def __post_init__(self) -> None:
        for name, convert in self.stored.items():
            setattr(self, name, convert(getattr(self, name)))
        if self.collect_stats:
            raise ConfigError(f"{type(self).__name__}: collect_stats=True is not supported.")
