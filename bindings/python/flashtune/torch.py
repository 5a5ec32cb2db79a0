"""PyTorch's attention on flashtune, switched on by `activate`.

    import flashtune
    flashtune.torch.activate()

Importing this module changes nothing. While an activation is in force, the operators behind
`scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` run on flashtune. A call
that flashtune does not serve runs on PyTorch's own kernel, and the reason is counted.
"""

import collections
import logging
import threading

import torch

from . import _torch_ops, _torch_sdpa  # noqa: F401  exported programs name the operators of _torch_ops
from ._errors import FlashtuneError, InvalidArgumentError, UnsupportedError

__all__ = ["Activation", "activate", "register"]

NAME = "flashtune"
"""The name of the implementation in PyTorch's registry of flash attention implementations."""

_FIRST = (2, 4)
_log = logging.getLogger("flashtune.torch")
_lock = threading.RLock()
_active = None
_MOST_REASONS = 1000
"""An activation counts at most so many reasons."""
_wanted = False
"""Whether the next activation serves dropout. The registry calls `_install` without arguments."""


class Activation:
    """An activation, in force until `remove` or the end of a `with` block.

    calls: for each operator the number of calls that flashtune served.
    reasons: for each pair (operator, reason) the number of calls that PyTorch's own kernel ran. The
        first 1000 pairs are counted.
    last_fallback: the last such pair, or None.
    dropout: whether calls with dropout are served.
    """

    def __init__(self, dropout):
        self.dropout = dropout
        self.calls = collections.Counter()
        self.reasons = collections.Counter()
        self.last_fallback = None
        self._library = torch.library.Library("aten", "IMPL")
        _torch_sdpa.install(self._library, self._note, dropout)

    @property
    def is_active(self):
        """Whether calls reach flashtune."""
        return self._library is not None

    def remove(self):
        """Gives the operators back to PyTorch. A second call does nothing."""
        with _lock:
            if _registry() is not None and _registry().current_flash_attention_impl() == NAME and _active is self:
                return _registry().restore_flash_attention_impl()
            self._uninstall()

    def _uninstall(self):
        global _active
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
        if _active is self:
            _active = None

    def _note(self, operator, reason):
        if reason is None:
            self.calls[operator] += 1
            return
        self.last_fallback = operator, reason
        # Reasons name sizes, of which a server sees ever new ones.
        if self.last_fallback not in self.reasons and len(self.reasons) >= _MOST_REASONS:
            return
        self.reasons[self.last_fallback] += 1
        if self.reasons[self.last_fallback] == 1:
            _log.info("%s runs on PyTorch's own kernel: %s", operator, reason)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


class _Handle:
    """An activation as PyTorch's registry sees it."""

    def __init__(self, activation):
        self._activation = activation

    def remove(self):
        with _lock:
            self._activation._uninstall()


def activate(*, dropout=False):
    """Runs PyTorch's attention on flashtune from now on, and returns the `Activation`.

    From PyTorch 2.11 on this goes through `torch.nn.attention`'s registry of implementations, under
    the name "flashtune". Before, the kernels are registered with the same dispatcher directly.

    dropout: True serves calls with dropout too. Their dropout mask is flashtune's, so a call's
        forward and backward pass must both run before `remove`. A call with dropout that the
        library cannot run then raises instead of running on PyTorch's own kernel.

    A second call returns the activation in force. It raises InvalidArgumentError if `dropout`
    differs. UnsupportedError: PyTorch is older than 2.4.
    """
    global _wanted
    if dropout is not True and dropout is not False:
        raise InvalidArgumentError(f"dropout is {dropout!r}; it must be False or True")
    _expect_version()
    with _lock:
        if _active is not None:
            if _active.dropout != dropout:
                raise InvalidArgumentError(
                    f"dropout is {dropout}; the activation in force has dropout={_active.dropout}, so remove it first"
                )
            return _active
        _wanted = dropout
        try:
            if _registry() is None:
                _install()
            else:
                register()
                _registry().activate_flash_attention_impl(NAME)
        finally:
            _wanted = False
        return _active


def register():
    """Adds "flashtune" to PyTorch's registry of flash attention implementations.

    `torch.nn.attention.activate_flash_attention_impl` can then activate it. Nothing is activated.
    UnsupportedError: PyTorch has no such registry, which 2.11 has.
    """
    _expect_version()
    if _registry() is None:
        raise UnsupportedError(
            f"this is PyTorch {torch.__version__}; its registry of flash attention implementations needs PyTorch 2.11, "
            "but flashtune.torch.activate works without it"
        )
    _registry().register_flash_attention_impl(NAME, register_fn=_install)


def _install():
    """Activates, and returns the handle that PyTorch's registry removes."""
    global _active
    with _lock:
        if _active is None:
            _active = Activation(_wanted)
        return _Handle(_active)


def _registry():
    """torch.nn.attention if it has the whole registry, else None."""
    import torch.nn.attention as attention

    has_all = all(hasattr(attention, f"{verb}_flash_attention_impl") for verb in ("register", "activate", "restore", "current"))
    return attention if has_all else None


def _expect_version():
    version = torch.__version__
    try:
        found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        raise FlashtuneError(f"the version of PyTorch is {version!r}, which has no major and minor number") from None
    if found < _FIRST:
        raise UnsupportedError(f"this is PyTorch {version}; flashtune.torch needs PyTorch 2.4 or later")
