"""Contexts: one library handle for each device of this process, created on first use and kept.

Knows the library's calls by name; takes packed params and addresses.
"""

import ctypes
import os
import threading
from ctypes import byref, c_uint64, c_void_p

from . import _structs
from ._errors import InvalidArgumentError
from ._library import check, library

CPU = -1
_contexts = {}
_pack = None
_lock = threading.Lock()


def context(device):
    """The context of a CUDA ordinal, or of `CPU`."""
    found = _contexts.get(device)
    if found is None:
        with _lock:
            found = _contexts.get(device)
            if found is None:
                found = _contexts[device] = Context(device)
    return found


def use_pack(path):
    """Names the pack (a file of kernels compiled ahead of time) of contexts on GPUs.

    path: a file; None means libflashtune.pack beside the library, if it exists; "" means no pack.
        The environment variable FLASHTUNE_PACK takes precedence, except over "".

    It must come before the first call on a GPU; later it raises InvalidArgumentError. A file that
    cannot be used raises nothing here: `pack_info` then has the reason.
    """
    global _pack
    name = None if path is None else _c_path(path)
    with _lock:
        if any(device != CPU for device in _contexts):
            raise InvalidArgumentError("use_pack comes too late: a GPU context exists; call it before the first call on a GPU")
        _pack = name


def _c_path(path):
    """The bytes of a path. C would end it at a NUL."""
    try:
        name = os.fsencode(path)
    except TypeError:
        raise TypeError(f"path is a {type(path).__name__}; it must be a str, bytes or an os.PathLike") from None
    if b"\0" in name:
        raise InvalidArgumentError(f"path is {path!r}; it must have no NUL")
    return name


def _forget():
    # A forked child has none of the parent's threads, and its CUDA state is unusable, so it starts
    # with new handles. Destroying the parent's handles would wait for those threads.
    global _lock
    _contexts.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Context:
    """A `flashtune_context`, never destroyed: interpreter shutdown has no reliable order."""

    def __init__(self, device):
        lib = library()
        options = _structs.ContextOptions(struct_size=ctypes.sizeof(_structs.ContextOptions))
        if device == CPU:
            options.backend = _structs.BACKEND_CPU
        else:
            options.backend = _structs.BACKEND_CUDA
            options.device_ordinal = device
            options.pack = _pack
        handle = c_void_p()
        check(lib.flashtune_context_create(byref(options), byref(handle)))
        self.handle = handle.value
        self._lib = lib
        self.forward = Pass(lib, self.handle, "forward")
        self.backward = Pass(lib, self.handle, "backward")

    def merge(self, params, stream):
        check(self._lib.flashtune_merge(self.handle, params, stream))

    def kv_append(self, params, stream):
        status = self._lib.flashtune_kv_append(self.handle, params, stream)
        if status:
            check(status)

    def quantize(self, params, stream):
        check(self._lib.flashtune_quantize(self.handle, params, stream))

    def autotune(self, params):
        check(self._lib.flashtune_autotune(self.handle, byref(params)))

    def pack_info(self):
        info = _structs.PackInfo(struct_size=ctypes.sizeof(_structs.PackInfo))
        check(self._lib.flashtune_context_pack(self.handle, byref(info)))
        return info

    def prepare_range(self, asked):
        info = _structs.RangeInfo(struct_size=ctypes.sizeof(_structs.RangeInfo))
        check(self._lib.flashtune_prepare_range(self.handle, byref(asked), byref(info)))
        return info

    def seal(self):
        check(self._lib.flashtune_context_seal(self.handle))

    def export_records(self, path):
        return self._counted(self._lib.flashtune_records_export, path)

    def import_records(self, path):
        return self._counted(self._lib.flashtune_records_import, path)

    def _counted(self, function, path):
        count = c_uint64()
        check(function(self.handle, _c_path(path), byref(count)))
        return count.value


class Pass:
    """The calls of one pass on one context."""

    def __init__(self, lib, handle, name):
        self.handle = handle
        self._supported = getattr(lib, f"flashtune_{name}_supported")
        self._workspace_size = getattr(lib, f"flashtune_{name}_workspace_size")
        self._prepare = getattr(lib, f"flashtune_{name}_prepare")
        self._launch = getattr(lib, f"flashtune_{name}")
        self._plan_info = getattr(lib, f"flashtune_{name}_plan_info")

    def supported(self, params):
        """Raises if a launch would refuse these params."""
        check(self._supported(self.handle, params))

    def workspace_bytes(self, params):
        size = c_uint64()
        status = self._workspace_size(self.handle, params, byref(size))
        if status:
            check(status)
        return size.value

    def prepare(self, params):
        check(self._prepare(self.handle, params))

    def launch(self, params, workspace, workspace_bytes, stream):
        status = self._launch(self.handle, params, workspace, workspace_bytes, stream)
        if status:
            check(status)

    def plan_info(self, params):
        info = _structs.PlanInfo(struct_size=ctypes.sizeof(_structs.PlanInfo))
        check(self._plan_info(self.handle, params, byref(info)))
        return info
