"""The base of all option groups."""

from pydantic import BaseModel, ConfigDict


class StrictBaseModel(BaseModel):
    """A model that takes no unknown option."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
