"""Routers that have named each other, so that each takes in what the others say."""


def introduced(*exchanges, now=0.0, wall=1000.0):
    """Have each name all others: each hears all of them first."""
    for _ in range(2):
        for sender in exchanges:
            data = sender.introduction(wall=wall)
            for other in exchanges:
                other.receive(data, now=now, wall=wall)
