"""What every section of the config shares."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0, lt=1)]

Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, data: Any) -> Any:
        """A section of which every line is commented out holds its defaults."""
        return {} if data is None else data
