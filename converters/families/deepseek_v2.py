"""DeepSeek-V2-Lite: a query of full rank, softmax routing without groups or bias, no MTP block.

DeepSeek-V2 itself routes by the best score of each group, which llama.cpp's graph does not compute
(it sums the two best): its `topk_method` is refused.
"""

from __future__ import annotations

from ..family import Family

FAMILY = Family()
