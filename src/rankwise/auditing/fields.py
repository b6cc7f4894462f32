"""The types of the fields of records."""

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _nan_from_null(value: object) -> object:
    return math.nan if value is None else value


Number = Annotated[float, BeforeValidator(_nan_from_null)]
"""A float that JSON writes as null where it is not finite."""


def _positive(value: float) -> float:
    if value <= 0:
        raise ValueError("Input should be above 0, or null")
    return value


Size = Annotated[Number, AfterValidator(_positive)]
"""A mean number of rows or columns; NaN where no sequence had any."""

Count = Annotated[int, Field(ge=0, lt=2**53)]
"""A number of things, or the number of one of them from 0; JSON knows no larger whole numbers exactly."""


class Record(BaseModel):
    """Base of all records: frozen, no unknown fields, null for what is not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")
