"""The library's functions that repeat calls. Knows no array library.

They are built-in functions of CPython, which the library makes at run time: through ctypes the
calls would take longer than what they save.
"""

import ctypes

from ._features import Features
from ._library import check, library


def functions(kinds, exchange, describe, empty_like, current_stream, limit):
    """(repeat, keep, alias, forget, count) of a new set of drafts; None where they cannot be made.

    kinds: the types of tensors. A subclass of them has no form.
    exchange: DLPack's capsule `__dlpack_c_exchange_api__` of such a tensor, or None.
    describe: without it, a function that describes a tensor as a tuple of ints, its address last,
        or () if it cannot be described.
    empty_like: makes a tensor like another.
    current_stream: the address of the current stream of a CUDA ordinal.
    limit: the most drafts. One more clears them.
    """
    make = getattr(ctypes.PyDLL(None, handle=library()._handle), "flashtune_python_drafts", None)
    if make is None:
        return None  # FLASHTUNE_LIBRARY may name an older library.
    make.argtypes, make.restype = [ctypes.py_object], ctypes.c_void_p
    compared = kinds, (tuple, Features), bool, int, float, None, True, exchange, describe
    address = make((compared, empty_like, current_stream, check, limit))
    # The functions live as long as the process.
    return None if address is None else ctypes.cast(address, ctypes.py_object).value
