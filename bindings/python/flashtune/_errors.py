"""The library's statuses as exceptions, with the library's message."""

OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2


class FlashtuneError(RuntimeError):
    """A call failed. `status` is the status number of the C header."""

    status = None

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidArgumentError(FlashtuneError, ValueError):
    """An argument is wrong. The message names it, its value and what is allowed."""

    status = INVALID_ARGUMENT


class UnsupportedError(FlashtuneError, NotImplementedError):
    """The problem is valid, but this build, device or backend does not support it."""

    status = UNSUPPORTED


_CLASSES = {INVALID_ARGUMENT: InvalidArgumentError, UNSUPPORTED: UnsupportedError}


def from_status(status, message):
    return _CLASSES.get(status, FlashtuneError)(message, status)


def shown(value):
    """The text of a wrong argument in a message: one line, and for a large array only its shape."""
    text = " ".join(repr(value).split())
    if len(text) <= 120:
        return text
    shape = getattr(value, "shape", None)
    return f"{text[:60]}..." if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
