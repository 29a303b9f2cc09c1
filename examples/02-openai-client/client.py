"""The official OpenAI client against the router: nothing in it knows that two engines answer."""

import argparse
import os
import sys

try:
    from openai import OpenAI, OpenAIError
except ModuleNotFoundError:
    sys.exit(
        "client: the Python package openai is not installed here: make install has it, in .venv"
    )

QUESTION = "A train carries bread from one station to another. What does it carry on its way back?"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    )
    base_url = parser.parse_args().base_url

    with OpenAI(
        base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    ) as client:
        model = client.models.list().data[0].id
        print(f"model:      {model}")
        print(f"chat:       {chat(client, model)}")
        print(f"completion: {completion(client, model)}")
        print(f"stream:     {stream(client, model)}")


def chat(client, model):
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=16, temperature=0
    )
    return said(answer.choices[0].message.content)


def completion(client, model):
    answer = client.completions.create(model=model, prompt=QUESTION, max_tokens=16, temperature=0)
    return said(answer.choices[0].text)


def stream(client, model):
    words = []
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        for chunk in chunks:
            if chunk.choices:
                words.append(chunk.choices[0].delta.content or "")
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
    return f"{said(''.join(words))} ({len(words)} chunks, {tokens} tokens)"


def said(text):
    if not text:
        sys.exit("client: the answer is empty")
    return repr(text)


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"client: {error}")
