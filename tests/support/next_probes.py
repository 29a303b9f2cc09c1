"""Which engines a schedule has probed now."""


def next_to_probe(schedule, members, now):
    """Return the engines whose probes begin at a glance at all of them."""
    schedule.know(members)
    return schedule.begin_due(schedule.due(members, now=now), now=now)
