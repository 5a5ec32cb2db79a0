"""The attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend flashtune

SGLang calls `plugin` in each of its processes, through the entry point `sglang.srt.plugins`. It
adds the name to the option's choices and to SGLang's registry. Nothing of SGLang changes unless the
name is chosen.
"""

import logging

from .._errors import InvalidArgumentError
from . import _interface

__all__ = ["NAME", "plugin", "register", "unregister"]

NAME = "flashtune"
"""The name for SGLang's option --attention-backend."""


def register():
    """Registers the backend and returns its name. A second call changes nothing.

    UnsupportedError: SGLang is older than 0.5.23. SGLang's interface is compared with the one that
    the backend was written for when SGLang makes the backend.
    """
    backends, choices = _registries()
    if backends.get(NAME, _make) is not _make:
        raise InvalidArgumentError(f"SGLang has another attention backend named {NAME}; only one plugin can have the name")
    backends[NAME] = _make
    if NAME not in choices:
        choices.append(NAME)
    return NAME


def unregister():
    """Removes the backend. Does nothing if it is not registered."""
    backends, choices = _registries()
    if backends.get(NAME) is _make:
        del backends[NAME]
        choices.remove(NAME)


def plugin():
    """`register` for SGLang, which would log a traceback of a plugin that nobody chose."""
    try:
        register()
    except Exception as error:  # an engine that nobody runs on flashtune must start
        logging.getLogger("flashtune.serving").warning("no attention backend for SGLang: %s", error)


def _make(runner):
    from . import _sglang_backend

    return _sglang_backend.make(runner)


def _registries():
    """(SGLang's functions that make a backend, by its name; the choices of --attention-backend)"""
    _interface.imported("sglang")
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS, ATTENTION_BACKEND_CHOICES
