"""The decoder, its weights, and how each family spells them."""

from jaxinfer.models.assembly import assemble_params as assemble_params
from jaxinfer.models.assembly import assemble_vision as assemble_vision
from jaxinfer.models.decoder import forward as forward
from jaxinfer.models.decoder import forward_with_aux as forward_with_aux
from jaxinfer.models.inputs import Aux as Aux
from jaxinfer.models.inputs import LogitsMode as LogitsMode
from jaxinfer.models.inputs import StepInputs as StepInputs
from jaxinfer.models.model import Model as Model
from jaxinfer.models.params import DecoderParams as DecoderParams
from jaxinfer.models.params import param_shapes as param_shapes
from jaxinfer.models.registry import family_of as family_of
from jaxinfer.models.stored_weights import WeightsError as WeightsError
from jaxinfer.models.vision import ImageFeatures as ImageFeatures
from jaxinfer.models.vision import VisionParams as VisionParams
from jaxinfer.models.vision import encode_image as encode_image
from jaxinfer.models.vision import vision_param_shapes as vision_param_shapes
