// The strip: what drafting does, in figures.

import { speedUp } from "./stream.js";

function put(id, text) {
  document.getElementById(id).textContent = text;
}

/** Counts one answer as it comes, and shows what drafting does. */
export class Meter {
  constructor() {
    this.tokens = this.rounds = this.drafted = this.accepted = 0;
    this.inContext = 0;
    this.start = null;
    for (const id of ["speed", "acceptance", "depth", "context"]) put(id, "–");
  }

  add(choice) {
    const now = performance.now();
    this.start ??= now;
    for (const name of ["tokens", "rounds", "drafted", "accepted"]) {
      this[name] += choice.counts?.[name] ?? 0;
    }
    const seconds = (now - this.start) / 1000;
    if (seconds > 0.05) this.show(this.tokens / seconds, this.drafted / this.rounds);
  }

  /** The server's own account has the last word. */
  end(timings, nContext) {
    this.inContext = timings.cached_tokens + timings.prefill_tokens + timings.decode_tokens;
    if (nContext) put("context", `${Math.round((100 * this.inContext) / nContext)} %`);
    this.drafted = timings.drafted;
    this.accepted = timings.accepted;
    this.show(timings.tokens_per_s, timings.depth);
  }

  /** Whether the answer had to end because the context has no more room. */
  isFull(nContext) {
    return nContext > 0 && this.inContext >= nContext - 1;
  }

  show(speed, depth) {
    put("speed", speed.toFixed(1));
    put("depth", Number.isFinite(depth) ? depth.toFixed(1) : "–");
    put("acceptance", this.drafted ? `${Math.round((100 * this.accepted) / this.drafted)} %` : "–");
  }
}

/** The server's estimate, which outlives an answer. */
export async function showSpeedUp(key) {
  const gain = await speedUp(key).catch(() => null);
  put("speed-up", gain === null ? "–" : `${gain.toFixed(2)} ×`);
}
