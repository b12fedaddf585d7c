"""Talk to `gguf-mtp serve` with OpenAI's client.

gguf-mtp serve model.gguf &
python examples/openai_client.py http://127.0.0.1:8080/v1 "What is the capital of France?"
"""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError


def main(url: str, question: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=100,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except OpenAIError as error:
        sys.exit(f"error: {error}")
