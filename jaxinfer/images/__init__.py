"""Images as a model's input: decoding, resizing, normalising, patches. Pillow and numpy, no jax."""

from jaxinfer.images.errors import ImageError as ImageError
from jaxinfer.images.prepare import PreparedImage as PreparedImage
from jaxinfer.images.prepare import prepare_image as prepare_image
from jaxinfer.images.prepare import prepare_pan_and_scan as prepare_pan_and_scan
from jaxinfer.images.prompt import ImageFacts as ImageFacts
from jaxinfer.images.prompt import ImagePrompt as ImagePrompt
from jaxinfer.images.prompt import expand_ids as expand_ids
from jaxinfer.images.prompt import expand_text as expand_text
from jaxinfer.images.prompt import image_prompt as image_prompt
from jaxinfer.images.prompt import locate_images as locate_images
from jaxinfer.images.prompt import mrope_positions as mrope_positions
from jaxinfer.images.resize import qwen_vl_size as qwen_vl_size
from jaxinfer.images.source import ImageSource as ImageSource
from jaxinfer.images.source import image_file as image_file
