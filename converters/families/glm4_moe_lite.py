"""GLM-4.7-Flash: DeepSeek-V3's layout; its config.json leaves the gating function unsaid.

Its code uses sigmoid (transformers, `Glm4MoeLiteTopkRouter`). llama.cpp guesses it from depth and
vocabulary and would take softmax for any other size, so it is always written.
"""

from __future__ import annotations

from ..family import Family

FAMILY = Family(defaults={"scoring_func": "sigmoid"})
