"""Answer every line of a file, four at a time, in one decode of the model per round.

python examples/batch.py model.gguf questions.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf_mtp


def main(path: str, questions: str) -> None:
    text = Path(questions).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    params = gguf_mtp.SamplingParams(temperature=0)
    with gguf_mtp.load(path, gguf_mtp.LoadOptions(n_seq=4, n_ctx=1024)) as model:
        prompts = [model.chat_tokens([{"role": "user", "content": line}]) for line in lines]
        answers: list[list[int]] = [[] for _ in prompts]
        for chunk in model.engine.generate(prompts, params, max_tokens=60):
            answers[chunk.seq] += chunk.tokens
        for line, answer in zip(lines, answers, strict=True):
            print(f"{line} -> {b''.join(map(model.vocab.piece, answer)).decode()}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (gguf_mtp.GgufMtpError, OSError) as error:
        sys.exit(f"error: {error}")
