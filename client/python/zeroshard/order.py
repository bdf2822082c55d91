"""The order in which units are gathered: recorded in one pass, followed in the next.

All decisions depend on the sequence of calls alone, never on time, so all ranks that run the same
model issue the same gathers in the same order, whether or not they prefetch.
"""


class GatherOrder:
    """One thread. A pass is a forward (and backward); passes of one kind follow one recording."""

    def __init__(self):
        self._recordings = {}
        self._kind = None
        self._recording = []
        self._expected = ()
        self._cursor = 0
        self._following = False
        self.changes = 0

    def begin(self, kind):
        """Starts a pass; what the previous one recorded becomes the order of its kind."""
        self.end()
        self._kind = kind
        self._recording = []
        self._expected = self._recordings.get(kind, ())
        self._cursor = 0
        self._following = bool(self._expected)

    def end(self):
        if self._kind is not None and self._recording:
            self._recordings[self._kind] = tuple(self._recording)
        self._kind = None
        self._following = False

    def note(self, unit):
        """`unit` is needed now. Returns False when this is where the pass left the recorded
        order."""
        if self._kind is None:
            return True
        self._recording.append(unit)
        if not self._following:
            return True
        if self._cursor < len(self._expected) and self._expected[self._cursor] == unit:
            self._cursor += 1
            return True
        self._following = False
        self.changes += 1
        return False

    def ahead(self):
        """The units that will be needed next, if the pass goes on as recorded."""
        return self._expected[self._cursor :] if self._following else ()

    def forget(self):
        self._recordings.clear()
        self._following = False
