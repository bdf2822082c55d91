"""The one exception of this package."""


class ZeroShardError(RuntimeError):
    """Anything that the daemon, a worker or this package refuses.

    `code` is the name of a gRPC status code: INVALID_ARGUMENT and FAILED_PRECONDITION are the
    caller's mistakes and leave everything as it was; UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS and
    RESOURCE_EXHAUSTED mean that the world failed.
    """

    def __init__(self, message, code="FAILED_PRECONDITION"):
        super().__init__(message)
        self.code = code


def invalid(message):
    return ZeroShardError(message, "INVALID_ARGUMENT")


def misuse(message):
    return ZeroShardError(message, "FAILED_PRECONDITION")
