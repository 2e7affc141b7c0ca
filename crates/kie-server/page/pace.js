// When tokens came, and what a page makes of that: a rate, gaps, a chart.

const WINDOW_MS = 400;

/** Arrival times of one answer's tokens, in milliseconds of `performance.now()`. */
export class Pace {
  #times = new Float64Array(1024);
  count = 0;

  /** Takes the times of tokens that came; those of one read share its time evenly. */
  add(pieces) {
    for (let from = 0; from < pieces.length; ) {
      let end = from + 1;
      while (end < pieces.length && pieces[end].at === pieces[from].at) end += 1;
      const at = pieces[from].at;
      const before = this.count ? this.#times[this.count - 1] : at;
      for (let n = 1; n <= end - from; n += 1) {
        this.#push(before + ((at - before) * n) / (end - from));
      }
      from = end;
    }
  }

  #push(time) {
    if (this.count === this.#times.length) {
      const more = new Float64Array(this.count * 2);
      more.set(this.#times);
      this.#times = more;
    }
    this.#times[this.count] = time;
    this.count += 1;
  }

  get first() {
    return this.#times[0];
  }

  get last() {
    return this.#times[this.count - 1];
  }

  /** Milliseconds between token `n` and the one before it, n >= 1. */
  gap(n) {
    return this.#times[n] - this.#times[n - 1];
  }

  /** Tokens a second behind the first token, all of them. */
  get mean() {
    const ms = this.count > 1 ? this.last - this.first : 0;
    return ms > 0 ? ((this.count - 1) * 1000) / ms : 0;
  }

  /** Tokens a second over the last 400 ms before `now`. */
  rate(now) {
    if (this.count < 2) return 0;
    const start = Math.max(this.first, now - WINDOW_MS);
    let n = this.count - 1;
    while (n > 0 && this.#times[n - 1] > start) n -= 1;
    const ms = now - start;
    return ms > 0 ? ((this.count - Math.max(n, 1)) * 1000) / ms : 0;
  }

  /** A usual gap in milliseconds: the median, or the mean of what came in bursts. */
  get usual() {
    return this.mean ? Math.max(this.quantile(0.5), 1000 / this.mean) : 0;
  }

  /** The gap that `share` of all gaps do not exceed, in milliseconds. */
  quantile(share) {
    if (this.count < 2) return 0;
    const gaps = Float64Array.from({ length: this.count - 1 }, (_, n) => this.gap(n + 1)).sort();
    return gaps[Math.min(gaps.length - 1, Math.ceil(share * gaps.length))];
  }
}

const GAP_MIN_MS = 0.02;
const GAP_MAX_MS = 200;
const MARKS = [
  [0.1, "0.1 ms"],
  [1, "1"],
  [10, "10"],
  [100, "100"],
];
const BAR_PX = 3;
const STALL_FACTOR = 3;

/** A bar a token on a logarithmic scale, the newest at the right. */
export class StripChart {
  #canvas;
  #context;
  #colours = {};
  #width = 0;
  #height = 0;
  #drawn = -1;

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.recolour();
  }

  /** Reads the theme's colours again. */
  recolour() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["accent", "warn", "line", "muted"]) {
      this.#colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.#drawn = -1;
  }

  #resize() {
    const scale = devicePixelRatio || 1;
    this.#width = this.#canvas.clientWidth;
    this.#height = this.#canvas.clientHeight;
    this.#canvas.width = Math.round(this.#width * scale);
    this.#canvas.height = Math.round(this.#height * scale);
    this.#context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#drawn = -1;
    this.onresize?.();
  }

  /** Draws the last gaps of `pace` that fit; `usualMs` tells stalls apart. */
  draw(pace, usualMs) {
    if (pace.count === this.#drawn) return;
    this.#drawn = pace.count;
    const width = this.#width;
    const height = this.#height;
    const context = this.#context;
    context.clearRect(0, 0, width, height);
    const top = Math.log(GAP_MAX_MS / GAP_MIN_MS);
    const tall = (ms) => (Math.log(Math.max(ms, GAP_MIN_MS * 1.1) / GAP_MIN_MS) / top) * height;
    this.#marks(width, height, tall);
    const left = 48;
    const fit = Math.floor((width - left) / BAR_PX);
    const from = Math.max(1, pace.count - fit);
    for (const stalls of [false, true]) {
      context.fillStyle = stalls ? this.#colours.warn : this.#colours.accent;
      for (let n = from; n < pace.count; n += 1) {
        const gap = pace.gap(n);
        if ((usualMs > 0 && gap > STALL_FACTOR * usualMs) !== stalls) continue;
        const bar = Math.min(tall(gap), height);
        context.fillRect(left + (n - from) * BAR_PX, height - bar, BAR_PX - 1, bar);
      }
    }
  }

  #marks(width, height, tall) {
    const context = this.#context;
    context.font = "11px ui-monospace, monospace";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const [ms, label] of MARKS) {
      const y = Math.round(height - tall(ms)) + 0.5;
      context.fillStyle = this.#colours.line;
      context.fillRect(48, y, width - 48, 1);
      context.fillStyle = this.#colours.muted;
      context.fillText(label, 42, y);
    }
  }
}
