"""What a round costs: the target decode by its number of rows, and the draft steps.

Both learn from measured seconds and answer for row counts and depths never tried. They do not know
what a row is for. Times of one row count scatter by a few percent on a quiet machine and by much
more on a shared one. The first ones may be many times too long, while weights are still read from
disk. So a time far above what is expected counts as a hiccup and is clipped at three standard
deviations, unless the next ones confirm it; a time far below proves the few before it wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_DRIFT = 0.01**2  # variance that the common scale gains in a round (log seconds)
_CELL_DRIFT = 0.002**2  # and one row count relative to the others
_CLIP = 3.0  # innovations beyond this many standard deviations are hiccups
_CONFIRMED = 3  # such innovations in a row, to the same side, are none
_YOUNG = 3  # samples of a row count that one much faster time may overrule
_HICCUP = 0.12  # by how much (log seconds) a lone first sample may be one
_NOISE = 0.1**2  # first guess of the variance of log seconds
_NOISE_RANGE = (0.005**2, 0.4**2)
_GUESS_SPREAD = 0.15  # relative doubt about a time whose graph was rebuilt
_RESTORED, _TRUSTED = 0.08, 8  # doubt about times of another run, and samples believed at most
_SLOPE = 0.2  # T(m + 1) - T(m) over T(1) while only one row count was seen
_DRAFT_DOUBT = 0.3  # standard deviation of a draft coefficient at first, in steps
_DRAFT_DRIFT = 0.01  # and what it gains in a round
_OPTIMISM = 1.5  # standard deviations
_BETWEEN = 0.85  # optimism for row counts between two that were seen
_BEYOND = 0.9  # and beyond the largest that was seen


@dataclass(slots=True)
class RowTime:
    """One row count: log seconds at scale 0, its variance, samples, the round last measured, and
    how many of the last times in a row were far above (or, negative, below) what was expected."""

    level: float
    variance: float
    n: int
    at: int
    streak: int = 0


class TargetCost:
    """T(m): seconds of a target decode with m rows, graph reused, the Python around it included.

    log T(m) = scale + level[m] + noise. The scale is common: as the context grows all T(m) drift
    together, and a row count that was not decoded lately moves with the others. Each observation is
    shared between the scale and its cell in proportion to their variances (a Kalman filter without
    the cross terms), so a cell that has not been measured for long takes most of a surprise itself.
    """

    def __init__(self) -> None:
        self.cells: dict[int, RowTime] = {}
        self.scale = 0.0
        self.noise = _NOISE
        self._excess = 0.0
        self._scale_variance = 0.0
        self._n_noise = 2
        self._n_rebuild = 4
        self._now = 0
        self._mean: list[float] = []
        self._low: list[float] = []

    def observe(self, m: int, seconds: float, same_shape: bool) -> None:
        """Learn from a decode of `m` rows; `same_shape`: the decode before had as many, so that
        llama.cpp reused its graph. Otherwise the excess is what rebuilding the graph costs."""
        self._now += 1
        self._scale_variance += _DRIFT
        cell = self.cells.get(m)
        if not same_shape:
            if cell is not None:
                self._n_rebuild = min(self._n_rebuild + 1, 64)
                excess = min(seconds - math.exp(self.scale + cell.level), seconds / 2)
                self._excess += (excess - self._excess) / self._n_rebuild
            return
        value = math.log(max(seconds, 1e-9))
        if cell is None:
            self._add(m, value)
        else:
            self._update(cell, value)
        self._mean = []

    def known(self) -> dict[int, tuple[float, int]]:
        """Seconds and number of samples of every row count seen."""
        return {m: (math.exp(self.scale + c.level), c.n) for m, c in self.cells.items()}

    def restore(self, known: dict[int, tuple[float, float]], noise: float, rebuild: float) -> None:
        """Take over what another run measured. Its scale may be off (another context length, a
        busier machine), so the first time measured sets it anew; few samples are trusted."""
        self.noise = min(max(noise, _NOISE_RANGE[0]), _NOISE_RANGE[1])
        self.scale, self._scale_variance = math.log(min(s for s, _ in known.values())), 1.0
        for m, (seconds, n) in known.items():
            trusted = min(int(n), _TRUSTED)
            doubt = self.noise / trusted + _RESTORED**2
            self.cells[m] = RowTime(math.log(seconds) - self.scale, doubt, trusted, 0)
        self._excess, self._n_rebuild = rebuild, 16
        self._mean = []

    def guess(self, m: int, seconds: float) -> None:
        """Take a time whose graph was rebuilt, of a row count that looks too dear to try again."""
        self._add(m, math.log(max(seconds - self.rebuild, 0.5 * seconds)))
        self.cells[m].variance += _GUESS_SPREAD**2
        self._mean = []

    def _add(self, m: int, value: float) -> None:
        if not self.cells:
            self.scale, self._scale_variance = value, 0.0
        self.cells[m] = RowTime(value - self.scale, self.noise, 1, self._now)

    def _update(self, cell: RowTime, value: float) -> None:
        cell.variance += _CELL_DRIFT * (self._now - cell.at)
        known = cell.variance + self._scale_variance
        total = known + self.noise
        bound = _CLIP * math.sqrt(total)
        error = value - self.scale - cell.level
        if self._is_news(cell, error, bound):
            self._start_anew(cell, error)
            return
        error = min(max(error, -bound), bound)
        if self._n_noise < 64:
            self._n_noise += 1
        self.noise += (error * error * self.noise / total - self.noise) / self._n_noise
        self.noise = min(max(self.noise, _NOISE_RANGE[0]), _NOISE_RANGE[1])
        cell_gain, scale_gain = cell.variance / total, self._scale_variance / total
        cell.level += cell_gain * error
        self.scale += scale_gain * error
        cell.variance *= 1 - cell_gain
        self._scale_variance *= 1 - scale_gain
        cell.n += 1
        cell.at = self._now

    @staticmethod
    def _is_news(cell: RowTime, error: float, bound: float) -> bool:
        """Whether a time says that what was believed is wrong, not that this decode was odd."""
        if abs(error) <= bound:
            cell.streak = 0
            return False
        side = 1 if error > 0 else -1
        cell.streak = cell.streak + side if cell.streak * side > 0 else side
        return abs(cell.streak) >= _CONFIRMED or (error < 0 and cell.n < _YOUNG)

    def _start_anew(self, cell: RowTime, error: float) -> None:
        """The last time is right: for the one row count of which little is known, or for all."""
        if cell.n < _YOUNG or len(self.cells) == 1:
            cell.level += error
            cell.variance, cell.n = self.noise, 1
        else:
            self.scale += error
        cell.streak, cell.at = 0, self._now

    def spread(self, m: int) -> float:
        """Relative standard error of T(m) against the other row counts; infinite if never seen."""
        cell = self.cells.get(m)
        if cell is None:
            return math.inf
        sampled = max(cell.variance, self.noise / cell.n)
        return math.sqrt(sampled + _CELL_DRIFT * (self._now - cell.at))

    @property
    def least(self) -> float:
        """The share of a measured time that is likely not noise."""
        return math.exp(-_OPTIMISM * math.sqrt(self.noise))

    @property
    def rebuild(self) -> float:
        """Seconds that a decode takes longer when the one before had another shape."""
        return max(self._excess, 0.0)

    def mean(self, size: int) -> list[float]:
        """Expected seconds of 0..`size` - 1 rows (entry 0 means nothing)."""
        if len(self._mean) < size:
            self._fill(size)
        return self._mean

    def low(self, size: int) -> list[float]:
        """The same, as low as it may well be: what an optimist would try."""
        if len(self._mean) < size:
            self._fill(size)
        return self._low

    def _fill(self, size: int) -> None:
        seen = sorted(self.cells)
        if not seen:
            self._mean, self._low = [1.0 + _SLOPE * m for m in range(size)], [1.0] * size
            return
        times = [math.exp(self.scale + self.cells[m].level) for m in seen]
        mean = [times[0]] * (seen[0] + 1)
        low = [_BETWEEN * times[0]] * seen[0]
        low.append(self._optimist(seen[0], times[0]))
        for i in range(1, len(seen)):
            before, after, gap = times[i - 1], times[i], seen[i] - seen[i - 1]
            for step in range(1, gap):
                mean.append(before + (after - before) * step / gap)
                low.append(_BETWEEN * mean[-1])
            mean.append(after)
            low.append(self._optimist(seen[i], after))
        self._extend(size, seen, times, mean, low)
        self._mean, self._low = mean, low

    def _optimist(self, m: int, seconds: float) -> float:
        """A first sample may have been a hiccup, two hardly."""
        hiccup = _HICCUP / self.cells[m].n ** 2
        return seconds * math.exp(-_OPTIMISM * self.spread(m) - hiccup)

    def _extend(
        self, size: int, seen: list[int], times: list[float], mean: list[float], low: list[float]
    ) -> None:
        """Past the last row count seen: between flat (each expert is awake already) and linear,
        a row costing no more than a decode of its own."""
        last, flat = seen[-1], times[-1]
        slope = _SLOPE * flat / max(last, 1)
        if len(seen) > 1:
            slope = max((flat - times[-2]) / (last - seen[-2]), 0.0)
            slope = min(slope, times[0] / seen[0])
        trust = 0.5 if len(seen) > 2 else 0.0
        for m in range(last + 1, size):
            rise = slope * (m - last)
            mean.append(flat + 0.5 * rise)
            low.append(_BEYOND * (flat + trust * rise))


class DraftCost:
    """D: seconds of drafting, linear in its steps; `idle` is what a round without a draft pays.

    One step (a batched decode of the drafter) proposes one token for each sequence still drafting:
    seconds = first + step * n_steps + row * (n_tokens - n_steps). A Kalman filter over the three
    coefficients, which drift slowly; they are kept from turning negative where they are used. With
    `is_block` a draft takes one step, however long it is.
    """

    def __init__(self, is_block: bool = False) -> None:
        self.is_block = is_block
        self.weights = [0.0, 0.0, 0.0]
        self.idle = 0.0
        self.n = 0
        self._n_idle = 0
        self._cov = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        self._noise = _NOISE

    def observe_idle(self, seconds: float, n_rounds: int = 1) -> None:
        """Rounds without a draft: mostly nothing, now and then a flush of observed rows."""
        self._n_idle = min(self._n_idle + n_rounds, 512)
        self.idle += (seconds - n_rounds * self.idle) / self._n_idle

    def observe(self, n_steps: int, n_tokens: int, seconds: float) -> None:
        """Learn from a round whose longest draft has `n_steps` tokens, and all together
        `n_tokens`."""
        steps, rows = float(1 if self.is_block else n_steps), float(n_tokens - n_steps)
        if self.n == 0:
            self._start(seconds / steps)
        self.n += 1
        cov, w = self._cov, self.weights
        px = [row[0] + row[1] * steps + row[2] * rows for row in cov]
        expected = w[0] + w[1] * steps + w[2] * rows
        known = px[0] + px[1] * steps + px[2] * rows
        total = known + self._noise * expected * expected
        if total <= 0.0:  # a clock that saw no time pass
            return
        bound = _CLIP * math.sqrt(total)
        error = min(max(seconds - expected, -bound), bound)
        for i in range(3):
            gain = px[i] / total
            w[i] += gain * error
            row = cov[i]
            for j in range(3):
                row[j] -= gain * px[j]
        self._drift(error * error * self._noise / total)

    def _start(self, step: float) -> None:
        """Before anything is known: no extra for the first step, further rows nearly free."""
        self.weights = [0.0, step, 0.1 * step]
        for i in range(3):
            self._cov[i][i] = (_DRAFT_DOUBT * step) ** 2

    def _drift(self, noise: float) -> None:
        self._noise += (noise - self._noise) / min(self.n + 2, 64)
        self._noise = min(max(self._noise, _NOISE_RANGE[0]), _NOISE_RANGE[1])
        step = self.weights[1]
        for i in range(3):
            if self._cov[i][i] < (_DRAFT_DOUBT * step) ** 2:
                self._cov[i][i] += (_DRAFT_DRIFT * step) ** 2

    def restore(self, weights: list[float]) -> None:
        """Take over another run's coefficients, open to doubt."""
        self._start(weights[1])
        self.weights = weights
        self.n = 1

    def parts(self, plain: float) -> tuple[float, float, float]:
        """Seconds of (the first step, each further step, each further row of a step).

        `plain`, the seconds of a 1-row target decode, stands in before anything was measured.
        """
        if self.n == 0:
            return 0.1 * plain, 0.0 if self.is_block else 0.1 * plain, 0.01 * plain
        first, step, row = self.weights
        least = 0.1 * max(step, first + step)
        if self.is_block:
            return max(first + step, least), 0.0, max(row, 0.0)
        return max(first + step, least), max(step, least), max(row, 0.0)
