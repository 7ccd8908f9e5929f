"""Conversations that reuse the state of their own past."""

from jaxinfer.chat.reply import Reply as Reply
from jaxinfer.chat.reply import Timings as Timings
from jaxinfer.chat.reply import Turn as Turn
from jaxinfer.chat.saved_files import SavedChatError as SavedChatError
from jaxinfer.chat.saved_session import ChatMismatchError as ChatMismatchError
from jaxinfer.chat.session import CapacityError as CapacityError
from jaxinfer.chat.session import ChatSession as ChatSession
