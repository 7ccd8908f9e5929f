"""Conversations that reuse the state of their own past."""

from jaxinfer.chat.session import ChatSession as ChatSession
from jaxinfer.chat.session import Reply as Reply
from jaxinfer.chat.session import Timings as Timings
from jaxinfer.chat.session import Turn as Turn
