"""Model families by the name that the config gives them."""

from ttv_train.models.base import ModelFamily
from ttv_train.models.cogvideox import CogVideoX
from ttv_train.models.hunyuan_video import HunyuanVideo
from ttv_train.models.ltx_video import LTXVideo
from ttv_train.models.stdit3 import STDiT3Family
from ttv_train.models.wan import Wan

_FAMILIES: tuple[ModelFamily, ...] = (CogVideoX(), STDiT3Family(), Wan(), HunyuanVideo(), LTXVideo())
FAMILIES: dict[str, ModelFamily] = {family.name: family for family in _FAMILIES}
