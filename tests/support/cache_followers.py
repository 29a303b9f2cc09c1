"""Routers that go by the KV events of engines, and what they know."""

import httpx

from pdrelay_proxy.features.kv_events.settings import KvEvents, KvEventSettings
from pdrelay_proxy.settings import PolicyName, Settings

FOLLOWING = Settings(
    prefill_policy=PolicyName.PREFIX,
    decode_policy=PolicyName.PREFIX,
    min_split_new_bytes=400,
    admin_key="sesame",
    health_check_interval_s=0.2,
    allowed_hosts=("*",),
).with_features(KvEventSettings(KvEvents.AUTO))


def explained(router, path, body):
    """Return what an operator is told of a request: where it would go, and why."""
    question = {"path": path, "body": body}
    answer = httpx.post(
        f"http://{router}/instances/explain", json=question, headers={"x-api-key": "sesame"}, timeout=20
    )
    assert answer.status_code == 200, answer.text
    return answer.json()
