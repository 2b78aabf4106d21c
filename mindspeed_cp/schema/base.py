"""What sections of the settings are made of: the strict section and the kinds of numbers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_cp.config_errors import one_line

LARGE = 10**9  # no setting is larger in earnest, and what counts in 64 bits further on does not overflow

Count = Annotated[int, Field(ge=1, le=LARGE)]
Natural = Annotated[int, Field(ge=0, le=LARGE)]
Positive = Annotated[float, Field(gt=0, le=LARGE)]
NotNegative = Annotated[float, Field(ge=0, le=LARGE)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A strict, frozen section: no unknown keys, no conversions (the text "3" is not the number 3), no infinities.

    Whatever is wrong is a ConfigError of one line, also where a section is made in Python.
    """

    #: Keys that are read too, and become others.
    also_read: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise one_line(type(self), error) from None
