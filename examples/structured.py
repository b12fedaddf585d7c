"""Bind an answer to a JSON schema, and read it as an object.

python examples/structured.py model.gguf "Plan a journey."
"""

from __future__ import annotations

import json
import sys

import gguf_mtp

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def main(path: str, question: str) -> None:
    options = gguf_mtp.AnswerOptions(json_schema=SCHEMA)
    with gguf_mtp.load(path) as model:
        pieces = model.chat([{"role": "user", "content": question}], options=options)
        answer = json.loads("".join(piece.text for piece in pieces))
        print(f"{answer['days']} days in {answer['city']!r}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except gguf_mtp.GgufMtpError as error:
        sys.exit(f"error: {error}")
