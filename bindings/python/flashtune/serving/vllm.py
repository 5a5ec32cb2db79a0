"""The attention backend of vLLM.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `plugin` in each of its processes, through the entry point `vllm.general_plugins`. It
registers `_vllm_backend.FlashtuneBackend` as vLLM's backend CUSTOM, the one that vLLM leaves to
plugins. Nothing of vLLM changes unless CUSTOM is chosen.
"""

import logging

from .._errors import InvalidArgumentError
from . import _interface

__all__ = ["NAME", "plugin", "register", "unregister"]

NAME = "CUSTOM"
"""The name for vLLM's option --attention-backend. A name of our own would not reach vLLM's worker
processes: they receive the option's value before they load plugins."""

_PATH = f"{__package__}._vllm_backend.FlashtuneBackend"


def register():
    """Registers the backend and returns its name. A second call changes nothing.

    UnsupportedError: vLLM is older than 0.33. InvalidArgumentError: CUSTOM belongs to another
    plugin. vLLM's interface is compared with the one that the backend was written for when vLLM
    loads the backend.
    """
    registry = _registry()
    custom = registry.AttentionBackendEnum.CUSTOM
    found = custom.get_path() if custom.is_overridden() else _PATH
    if found != _PATH:
        raise InvalidArgumentError(f"vLLM's backend CUSTOM is {found}; only one plugin can have it (see VLLM_PLUGINS)")
    registry.register_backend(custom, _PATH)
    return NAME


def unregister():
    """Removes the backend. Does nothing if CUSTOM is not this backend."""
    custom = _registry().AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() == _PATH:
        custom.clear_override()


def plugin():
    """`register` for vLLM, which would end with an exception of a plugin that nobody chose."""
    try:
        register()
    except Exception as error:  # an engine that nobody runs on flashtune must start
        logging.getLogger("flashtune.serving").warning("no attention backend for vLLM: %s", error)


def _registry():
    _interface.imported("vllm")
    from vllm.v1.attention.backends import registry

    return registry
