"""The one place that reaches for the native module.

`native()` returns an object with `attach(...) -> Session`. Tests put a stand-in there with
`use(...)`.
"""

_override = None


def native():
    if _override is not None:
        return _override
    from zeroshard import _native

    return _native


def use(module):
    """Replaces the native module (None: back to the real one). For tests."""
    global _override
    _override = module
