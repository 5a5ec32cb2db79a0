"""The library's statuses as exceptions, each with the library's own sentence."""

OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2


class FlashtuneError(RuntimeError):
    """A call failed; `status` is the number that the C header documents."""

    status = None

    def __init__(self, message, status=None):
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidArgumentError(FlashtuneError, ValueError):
    """An argument is wrong; the message names it, its value and what is allowed."""

    status = INVALID_ARGUMENT


class UnsupportedError(FlashtuneError, NotImplementedError):
    """A valid problem that this build, device or backend does not do."""

    status = UNSUPPORTED


_CLASSES = {INVALID_ARGUMENT: InvalidArgumentError, UNSUPPORTED: UnsupportedError}


def from_status(status, message):
    return _CLASSES.get(status, FlashtuneError)(message, status)
