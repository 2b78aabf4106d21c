"""Base class of the sections of the settings, and their number types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.schema.messages import to_setting_error

SETTING_LIMIT = 10**9  # larger than any sensible value, and products of settings stay below 2**63

PositiveInt = Annotated[int, Field(ge=1, le=SETTING_LIMIT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=SETTING_LIMIT)]
PositiveFloat = Annotated[float, Field(gt=0, le=SETTING_LIMIT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=SETTING_LIMIT)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A strict, frozen section: no unknown keys, no conversions (the text "3" is not the number 3), no infinities.

    Raises ConfigError of one line for an invalid value, also where a section is made in Python.
    """

    #: Keys accepted under other names, which are translated.
    alias_keys: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise to_setting_error(type(self), error) from None
        except UnicodeEncodeError as error:  # half of a surrogate pair, which pydantic cannot take
            raise ConfigError(f"{type(self).__name__}: {error.object!r} is no Unicode text; mend it") from None

    @classmethod
    def key_names(cls) -> tuple[str, ...]:
        """Return the names of all keys that the section accepts."""
        return (*cls.model_fields, *cls.alias_keys)
