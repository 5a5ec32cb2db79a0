"""Finds and loads libflashtune, once per process, and declares the functions called here.

The places are `FLASHTUNE_LIBRARY` (a file), the folder of this package, and, in the repository that
contains this file, `release` and `debug` in `target` and in `CARGO_TARGET_DIR`. Knows nothing of
arrays or attention.
"""

import ctypes
import os
import sys
import threading
from ctypes import POINTER, c_char_p, c_int32, c_uint64, c_void_p
from pathlib import Path

from . import _errors, _structs
from ._version import __version__

_NAME = {"darwin": "libflashtune.dylib"}.get(sys.platform, "libflashtune.so")
_lock = threading.Lock()
_library = None


def _renew():
    # Another thread of the parent may have held it, and is not in the child.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def candidates():
    """The files to try, in order."""
    explicit = os.environ.get("FLASHTUNE_LIBRARY")
    if explicit:
        return [Path(explicit)]
    package = Path(__file__).resolve().parent
    places = [package]
    for parent in package.parents:
        if (parent / "Cargo.toml").is_file():
            # `make lib` builds in target/, cargo alone where the variable says.
            for target in filter(None, (parent / "target", os.environ.get("CARGO_TARGET_DIR"))):
                places += [Path(target) / "release", Path(target) / "debug"]
            break
    return [place / _NAME for place in places]


def library():
    """The loaded library. Raises FlashtuneError with the places tried if none is found."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def check(status):
    """Raises the exception of a nonzero status, with the library's message for this thread."""
    if status:
        message = _library.flashtune_last_error() or b""
        raise _errors.from_status(status, message.decode("utf-8", "replace") or f"status {status}")


def _load():
    paths = candidates()
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        tried = ", ".join(str(path) for path in paths)
        raise _errors.FlashtuneError(f"libflashtune was not found; tried {tried}. Build it, or set FLASHTUNE_LIBRARY.")
    try:
        # The loader would search the system's folders for a name without a slash.
        loaded = ctypes.CDLL(str(found.absolute()))
        loaded.flashtune_version_string.restype = c_char_p
        version = loaded.flashtune_version_string().decode()
    except (OSError, AttributeError) as error:
        raise _errors.FlashtuneError(f"{found} could not be loaded as libflashtune: {error}") from error
    # Before 1.0 a minor version may change the header; from 1.0 on structs grow by struct_size.
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise _errors.FlashtuneError(f"{found} is flashtune {version}; this package needs {__version__}")
    _declare(loaded)
    return loaded


def _declare(lib):
    size_out, options = POINTER(c_uint64), POINTER(_structs.ContextOptions)
    signatures = {
        "flashtune_context_create": [options, POINTER(c_void_p)],
        "flashtune_context_pack": [c_void_p, POINTER(_structs.PackInfo)],
        "flashtune_context_seal": [c_void_p],
        "flashtune_prepare_range": [c_void_p, POINTER(_structs.Range), POINTER(_structs.RangeInfo)],
        "flashtune_autotune": [c_void_p, POINTER(_structs.AutotuneParams)],
        "flashtune_records_export": [c_void_p, c_char_p, size_out],
        "flashtune_records_import": [c_void_p, c_char_p, size_out],
    }
    for name in ("merge", "kv_append", "quantize"):
        signatures[f"flashtune_{name}"] = [c_void_p, c_char_p, c_void_p]
    for name in ("forward", "backward"):
        # Params are packed bytes, which ctypes passes by address, or an address.
        signatures[f"flashtune_{name}_supported"] = [c_void_p, c_void_p]
        signatures[f"flashtune_{name}_workspace_size"] = [c_void_p, c_char_p, size_out]
        signatures[f"flashtune_{name}_prepare"] = [c_void_p, c_char_p]
        signatures[f"flashtune_{name}"] = [c_void_p, c_void_p, c_void_p, c_uint64, c_void_p]
        signatures[f"flashtune_{name}_plan_info"] = [c_void_p, c_char_p, POINTER(_structs.PlanInfo)]
    for name, arguments in signatures.items():
        function = getattr(lib, name)
        function.argtypes = arguments
        function.restype = c_int32
    lib.flashtune_last_error.restype = c_char_p
    lib.flashtune_last_error.argtypes = []
