"""Model families by the name that the config gives them."""

from ttv_train.models.base import ModelFamily
from ttv_train.models.cogvideox import CogVideoX
from ttv_train.models.stdit3 import STDiT3Family

_FAMILIES: tuple[ModelFamily, ...] = (CogVideoX(), STDiT3Family())
FAMILIES: dict[str, ModelFamily] = {family.name: family for family in _FAMILIES}
