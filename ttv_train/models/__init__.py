"""Model families by the name that the config gives them."""

from ttv_train.models.base import ModelFamily
from ttv_train.models.cogvideox import CogVideoX

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in (CogVideoX(),)}
