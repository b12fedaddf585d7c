"""DeepSeek-V3, R1, V3.1 and Kimi-K2: the family that the others differ from."""

from __future__ import annotations

from ..family import Family

FAMILY = Family()
