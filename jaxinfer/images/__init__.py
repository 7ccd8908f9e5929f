"""Images as a model's input: decoding, resizing, normalising, patches. Pillow and numpy, no jax."""

from jaxinfer.images.errors import ImageError as ImageError
from jaxinfer.images.prepare import PreparedImage as PreparedImage
from jaxinfer.images.prepare import prepare_image as prepare_image
from jaxinfer.images.prepare import prepare_pan_and_scan as prepare_pan_and_scan
from jaxinfer.images.resize import qwen_vl_size as qwen_vl_size
from jaxinfer.images.source import ImageSource as ImageSource
