"""Which dtypes of q, k and v go together, for all array libraries."""

from . import _call, _eight, _structs
from ._errors import InvalidArgumentError

_ALONE = {**_call.DTYPES, "float8_e4m3fn": _structs.DTYPE_E4M3}
"""The numbers of the dtypes that q, k and v may all have, by their names."""
_BESIDE_NARROW = {name: _ALONE[name] for name in ("float16", "bfloat16")}
"""The dtypes of q beside k and v of 8 bits or int4."""


def numbers(names, int4_group, shown, backward=False):
    """(the C header's number of q's dtype, that of k's and v's if it is another, else 0).

    names: the names of the dtypes of q, k and v. `shown` formats such a name for a message.
    backward: allow only dtypes that have a backward pass.
    """
    q, k, _ = names
    narrow, wanted, reason = 0, q, ", as q is"
    if int4_group is not None:
        narrow, wanted, reason = _eight.int4_number(int4_group), "uint8", " with int4_group"
    elif k in _eight.NUMBERS and q not in _eight.NUMBERS and not backward:
        narrow, wanted, reason = _eight.NUMBERS[k], k, ", as k is"
    for name, found in zip("kv", names[1:]):
        if found != wanted:
            raise InvalidArgumentError(f"{name} is {shown(found)}; it must be {shown(wanted)}{reason}")
    allowed = _BESIDE_NARROW if narrow else _call.DTYPES if backward else _ALONE
    if q not in allowed:
        beside = f", since k is {shown(k)}" if narrow else ""
        raise InvalidArgumentError(f"q is {shown(q)}; it must be {' or '.join(map(shown, allowed))}{beside}")
    return allowed[q], narrow


def sixteen_bits(name, dtype, shown):
    """The number of a tensor's dtype, which is quantised or rotated."""
    if dtype not in _BESIDE_NARROW:
        raise InvalidArgumentError(f"{name} is {shown(dtype)}; it must be {' or '.join(map(shown, _BESIDE_NARROW))}")
    return _BESIDE_NARROW[dtype]


def of_out(q):
    """The dtype of out, and of bias, by that of q: the same, or bfloat16 where q has 8 bits."""
    return "bfloat16" if q in _eight.NUMBERS else q
