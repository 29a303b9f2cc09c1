"""Hears what a store of engines says."""


class Ear:
    """What a store has said."""

    def __init__(self):
        self.entries = None
        self.history = []
        self.hearings = 0

    async def receive(self, entries):
        self.entries = dict(entries)
        self.history.append(self.entries)

    def heard(self):
        self.hearings += 1
