"""Which earlier states of a sequence a recurrent cache can go back to.

A recurrent layer holds no row per token but a state, which every pass replaces. A context made with
`n_rs_seq` = N keeps, of each sequence in a pass, the states after its last N + 1 rows, and
`llama_memory_seq_rm` then takes up to N rows off. It does so without asking whether the last pass
wrote that many: with fewer rows than that it goes back to a state of an older pass and says
nothing. The same states are lost where a later pass moves the sequence's cell, and a removed row
is taken off for good by the next pass only. What follows from all that is reckoned here; llama.cpp
is not asked. Source: `src/llama-memory-recurrent.cpp` (seq_rm, seq_cp, find_slot, s_copy),
`src/llama-batch.cpp` (split_equal), `src/models/delta-net-base.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf_mtp.types import Rows

__all__ = ["RecurrentStates", "passes"]


class RecurrentStates:
    """Of `n_seq` sequences whose states after the last `n_kept` + 1 rows are kept."""

    def __init__(self, n_seq: int, n_kept: int) -> None:
        self._n_kept = n_kept
        self._droppable = [0] * n_seq
        self._is_rewound = [False] * n_seq

    def decoded(self, rows: Sequence[Rows]) -> None:
        """These rows are in the cache now. Of rows with logits all but the first can be dropped: a
        draft, but not the certain token before it."""
        self._droppable = [0] * len(self._droppable)
        for r in rows:
            self._droppable[r.seq] = max(min(self._n_kept, r.n_outputs - 1), 0)
            self._is_rewound[r.seq] = False

    def can_drop(self, seq: int, n_rows: int) -> bool:
        """Whether the state before the sequence's last `n_rows` rows is kept."""
        return n_rows <= self._droppable[seq]

    def dropped(self, seq: int) -> None:
        """Rows were dropped, which can be done once between two passes."""
        self._droppable[seq], self._is_rewound[seq] = 0, True

    def can_share(self, seq: int) -> bool:
        """Whether another sequence may go on from this one's state. Which of the kept states is
        meant after a rewind is known of the sequence only, not of the cell that both would hold."""
        return not self._is_rewound[seq]

    def shared(self, src: int, dst: int) -> None:
        """Both hold one cell: a rewind of one would move the other."""
        self._droppable[src] = self._droppable[dst] = 0
        self._is_rewound[dst] = False

    def replaced(self, seq: int) -> None:
        """The sequence is empty, or holds what was saved."""
        self._droppable[seq], self._is_rewound[seq] = 0, False


def passes(rows: Sequence[Rows]) -> list[list[Rows]]:
    """How rows of several sequences are decoded so that every draft's states stay.

    llama.cpp takes sequences of one length together and gives them neighbouring cells, moving the
    cells that lie there, of which it then knows the newest state only. So nothing may be moved
    behind a draft: first what has no draft, then the largest group of drafts of one length, then
    the other drafts each alone, which moves nothing.
    """
    if len(rows) < 3 or len({len(r.tokens) for r in rows}) == 1:
        return [list(rows)]
    still = [r for r in rows if r.n_outputs < 2]
    by_length: dict[int, list[Rows]] = {}
    for r in rows:
        if r.n_outputs >= 2:
            by_length.setdefault(len(r.tokens), []).append(r)
    groups = sorted(by_length.values(), key=len, reverse=True)
    alone = [[r] for group in groups[1:] for r in group]
    return [group for group in (still, *groups[:1], *alone) if group]
