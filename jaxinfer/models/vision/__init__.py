"""Image towers: configs, weights, and pixels to features."""

from jaxinfer.models.vision.encode import encode_image as encode_image
from jaxinfer.models.vision.params import ImageFeatures as ImageFeatures
from jaxinfer.models.vision.params import MergerParams as MergerParams
from jaxinfer.models.vision.params import SiglipProjectorParams as SiglipProjectorParams
from jaxinfer.models.vision.params import VisionParams as VisionParams
from jaxinfer.models.vision.shapes import vision_param_shapes as vision_param_shapes
