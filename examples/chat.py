"""Ask a model one question and print its answer as it comes.

python examples/chat.py model.gguf "What is the capital of France?"
"""

from __future__ import annotations

import sys

import gguf_mtp


def main(path: str, question: str) -> None:
    params = gguf_mtp.SamplingParams(temperature=0)
    with gguf_mtp.load(path) as model:
        for piece in model.chat([{"role": "user", "content": question}], params, max_tokens=100):
            print(piece.text, end="", flush=True)
        print()
        stats = model.engine.totals
        print(
            f"{stats.tokens_per_s:.0f} tokens/s, {stats.tokens_per_round:.2f} tokens per round, "
            f"acceptance rate {stats.acceptance_rate:.2f}"
        )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except gguf_mtp.GgufMtpError as error:
        sys.exit(f"error: {error}")
