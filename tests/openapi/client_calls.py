"""Calls a router with a client that was made of its document: ``client_calls.py URL KEY ADMIN_KEY``; prints JSON.

It runs in an environment that has neither the router nor its tests. ``router_client`` is what was made.
"""

import json
import sys

from router_client import AuthenticatedClient, Client
from router_client.api.models import get_v1_models
from router_client.api.operators import get_instances, post_instances_add, post_instances_drain
from router_client.api.probes import get_health
from router_client.api.two_legs import create_chat_completion, create_completion
from router_client.models import (
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    ChatCompletionUserMessageParam,
    CompletionRequest,
    DrainedInstance,
    EngineRole,
    FunctionDefinition,
    NewInstance,
)

QUESTION = ChatCompletionUserMessageParam(content="Say hello.", role="user")
TOOL = ChatCompletionToolsParam(function=FunctionDefinition(name="greet"))


def main(url, key, admin_key):
    stranger = Client(base_url=url)
    client = AuthenticatedClient(base_url=url, token=key)
    operator = Client(base_url=url, headers={"X-Api-Key": admin_key})
    completion = create_completion.sync(client=client, body=CompletionRequest(prompt="once upon a time", max_tokens=5))
    chat = create_chat_completion.sync(
        client=client, body=ChatCompletionRequest(messages=[QUESTION], max_tokens=5, tools=[TOOL]), x_request_id="mine"
    )
    no_model = create_chat_completion.sync_detailed(
        client=client, body=ChatCompletionRequest(messages=[QUESTION], model="none of these")
    )
    no_key = create_completion.sync_detailed(client=stranger, body=CompletionRequest(prompt="once"))
    models = get_v1_models.sync(client=client)
    instances = get_instances.sync(client=operator)
    drained = post_instances_drain.sync(client=operator, body=DrainedInstance(id="prefill-1"))
    no_address = post_instances_add.sync_detailed(
        client=operator, body=NewInstance(type_=EngineRole.DECODE, instance="d0:0")
    )
    said = {
        "health": get_health.sync(client=stranger).status,
        "completion": [type(completion).__name__, completion.choices[0].text, completion.usage.completion_tokens],
        "chat": [type(chat).__name__, *(choice.message.content for choice in chat.choices)],
        "no model": [no_model.status_code, no_model.parsed.error.param],
        "no key": [no_key.status_code, no_key.parsed.error.type_],
        "models": [model.id for model in models.data],
        "instances": [[row.id, row.role] for row in instances.instances],
        "drained": [[row.id, row.state] for row in drained.instances],
        "no address": [no_address.status_code, no_address.parsed.detail],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
