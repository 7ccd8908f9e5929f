"""Tiny models to test and to show things with: configs, random weights, a tokenizer and chat templates.

    model = tiny_model("gemma3", seed=0)
    jaxinfer.generate(model, ["hello"], max_new_tokens=8)

Everything is made in milliseconds, the same on every call, without a download.
"""

from jaxinfer.testing.configs import TINY_FAMILIES as TINY_FAMILIES
from jaxinfer.testing.configs import tiny_config as tiny_config
from jaxinfer.testing.models import tiny_model as tiny_model
from jaxinfer.testing.params import random_params as random_params
from jaxinfer.testing.params import random_vision_params as random_vision_params
from jaxinfer.testing.templates import CHATML_TEMPLATE as CHATML_TEMPLATE
from jaxinfer.testing.templates import GEMMA_TEMPLATE as GEMMA_TEMPLATE
from jaxinfer.testing.templates import toy_chat_template as toy_chat_template
from jaxinfer.testing.tokenizer import toy_tokenizer as toy_tokenizer
