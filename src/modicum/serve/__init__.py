"""A model over HTTP: the OpenAI API, a page to talk to it, limits on what one client may ask for.

Decoding is the engine's part (generate); this room turns requests into tokens and parameters, and answers into events.
"""

from modicum.serve.app import Access, create_app
from modicum.serve.limits import Limits
from modicum.serve.server import ServerSettings, serve
from modicum.serve.service import Served, Service, model_name

__all__ = ["Access", "Limits", "Served", "ServerSettings", "Service", "create_app", "model_name", "serve"]
