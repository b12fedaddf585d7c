"""How deep a text makes llama.cpp's tokenizer recurse.

llama.cpp cuts text into words with `std::regex`, which calls itself for every character of a match
(`unicode_regex_split_stl`): a few ten thousand letters or spaces in a row overflow a thread's usual
stack of 8 MiB, and end the process. Knows nothing of vocabularies.
"""

from __future__ import annotations

import re

__all__ = ["deepest"]

# What one match may reach over, whatever the model's expressions are: words and what stands between
# them, white space, signs, digits. Characters beyond ASCII may be of any kind.
_RUNS = tuple(
    re.compile(f"[{kinds}]+") for kinds in (r"A-Za-z \x80-\U0010ffff", r"\s", r"^A-Za-z0-9 ", r"\d")
)


def deepest(text: str) -> int:
    """No match is longer than this, in characters."""
    return max(
        (match.end() - match.start() for run in _RUNS for match in run.finditer(text)), default=0
    )
