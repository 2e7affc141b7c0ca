// Everything that shows an answer: text, numbers, the chart, the replay. Drawn once a frame.

import { Pace, StripChart } from "./pace.js";
import { CodeView } from "./view.js";

const $ = (id) => document.getElementById(id);
const NUMBERS_EVERY_MS = 100;
const REPLAY_TOKEN_MS = 10;

/** Three digits of what a person reads. */
function short(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2);
}

function seconds(ms) {
  return ms < 1000 ? `${short(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** The same pieces again, one every 10 ms. */
class Replay {
  #view;
  #scroller = $("slow");
  #note = $("slow-note");
  #pieces = [];
  #shown = 0;
  #since = 0;
  #whole = false;
  #late = false;
  active = false;

  constructor() {
    this.#view = new CodeView($("replay"), this.#scroller);
  }

  reset(what, before) {
    this.#view.reset(what, before);
    this.#pieces = [];
    this.#shown = 0;
    this.#whole = false;
    this.#late = false;
    this.active = true;
    this.#note.textContent = "";
  }

  add(pieces) {
    if (!this.#pieces.length && pieces.length) this.#since = pieces[0].at;
    for (const { text } of pieces) this.#pieces.push(text);
  }

  /** Nothing more will come; `seen` false stops here. */
  end(seen) {
    this.#whole = true;
    if (!seen || !this.#pieces.length) this.active = false;
  }

  follow() {
    if (this.active) this.#view.follow();
  }

  frame(now) {
    if (!this.active || !this.#pieces.length) return;
    const paced = Math.floor(Math.max(0, now - this.#since) / REPLAY_TOKEN_MS) + 1;
    const due = Math.min(this.#pieces.length, paced);
    if (due > this.#shown) {
      this.#view.write(this.#pieces.slice(this.#shown, due).join(""));
      this.#shown = due;
    }
    const total = this.#pieces.length;
    // An answer that comes slower than this pace is shown when it comes.
    this.#late ||= !this.#whole && paced > total + 10;
    const ms = this.#late ? now - this.#since : (this.#shown - 1) * REPLAY_TOKEN_MS;
    const spent = ms / 1000;
    this.#note.textContent = `${this.#shown} of ${total}, ${spent.toFixed(2)} s`;
    if (this.#whole && this.#shown === total) {
      this.#view.end();
      this.active = false;
    }
  }
}

export class Stage {
  #view = new CodeView($("output"), $("own"));
  #chart = new StripChart($("chart"));
  #replay = new Replay();
  #pace = new Pace();
  #stream = null;
  #scheduled = false;
  #numbersAt = 0;
  #usualMs = 0;
  #text = [];
  #onend;

  constructor() {
    this.#chart.onresize = () => this.#chart.draw(this.#pace, this.#usualMs);
    document.addEventListener("visibilitychange", () => {
      this.#scheduled = false;
      this.wake();
    });
  }

  /** The answer so far. */
  get text() {
    return this.#text.join("");
  }

  /** Tokens that came. */
  get count() {
    return this.#pace.count;
  }

  /** The theme changed. */
  recolour() {
    this.#chart.recolour();
    this.#chart.draw(this.#pace, this.#usualMs);
  }

  /** Shows `stream`; `onend` is called with it when nothing more comes. */
  begin(stream, mode, before, onend) {
    this.#stream = stream;
    this.#onend = onend;
    this.#pace = new Pace();
    this.#text = [];
    this.#usualMs = 0;
    this.#view.reset(mode === "chat" ? "answer" : "code", before);
    this.#replay.reset(mode === "chat" ? "answer" : "code", before);
    for (const id of ["ttft", "elapsed", "prompt-tokens", "output-tokens", "mbu", "gaps"]) {
      $(id).textContent = "–";
    }
    $("rate").textContent = "0";
    $("own-note").textContent = "";
    this.#share(0);
    this.wake();
  }

  /** Ends the run where it is: nothing more is shown. */
  stop() {
    this.#replay.end(false);
    if (this.#stream) this.#finish(true);
  }

  /** Something came: it is shown with the next frame, or soon where nobody looks. */
  wake() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    if (document.hidden) setTimeout(() => this.#frame(performance.now()), 250);
    else requestAnimationFrame(() => this.#frame(performance.now()));
  }

  #frame(now) {
    this.#scheduled = false;
    if (this.#stream) {
      const pieces = this.#stream.drain();
      if (pieces.length) {
        const text = pieces.map((piece) => piece.text).join("");
        this.#text.push(text);
        this.#view.write(text);
        this.#pace.add(pieces);
        this.#replay.add(pieces);
      }
      if (this.#stream.done) this.#finish(false);
      else this.#live(now);
    }
    this.#replay.frame(now);
    this.#chart.draw(this.#pace, this.#usualMs);
    // Last, together: each costs a layout where text was added since the one before.
    this.#view.follow();
    this.#replay.follow();
    if (this.#stream || this.#replay.active) this.wake();
  }

  #live(now) {
    const pace = this.#pace;
    if (!pace.count || now - this.#numbersAt < NUMBERS_EVERY_MS) return;
    this.#numbersAt = now;
    this.#usualMs = pace.usual;
    $("rate").textContent = short(pace.rate(now));
    $("ttft").textContent = seconds(pace.first - this.#stream.startedAt);
    $("elapsed").textContent = seconds(now - this.#stream.startedAt);
    $("output-tokens").textContent = String(pace.count);
  }

  #finish(cancelled) {
    const stream = this.#stream;
    const pace = this.#pace;
    this.#stream = null;
    this.#view.end();
    this.#replay.end(!cancelled);
    this.#usualMs = pace.usual;
    if (pace.count) {
      $("ttft").textContent = seconds(pace.first - stream.startedAt);
      $("elapsed").textContent = seconds(pace.last - stream.startedAt);
      $("own-note").textContent = `${pace.count} tokens, ${seconds(pace.last - pace.first)}`;
    }
    this.#counted(stream, cancelled);
    this.#timed(stream.timings, pace);
    this.#onend(stream, cancelled);
  }

  #counted({ usage, finishReason, failure }, cancelled) {
    const why = cancelled ? "cancelled" : failure ? "cut off" : (finishReason ?? "");
    const tokens = usage?.completion_tokens ?? this.#pace.count;
    $("output-tokens").textContent = why ? `${tokens}, ${why}` : String(tokens);
    if (!usage) return;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    $("prompt-tokens").textContent = cached
      ? `${usage.prompt_tokens}, ${cached} cached`
      : String(usage.prompt_tokens);
  }

  #timed(timings, pace) {
    $("rate").textContent = short(timings?.predicted_per_second ?? pace.mean);
    const parts = timings?.itl_p50_us
      ? [timings.itl_p50_us / 1000, timings.itl_p99_us / 1000, timings.itl_max_us / 1000]
      : [pace.quantile(0.5), pace.quantile(0.99), pace.quantile(1)];
    if (pace.count > 1) {
      const where = timings?.itl_p50_us ? "on the device" : "here";
      const [p50, p99, most] = parts.map((ms) => `${short(ms)} ms`);
      const text = `${where}: p50 ${p50}, p99 ${p99}, max ${most}`;
      $("gaps").textContent = text;
      $("chart").setAttribute("aria-label", `Gaps between tokens, ${text}`);
    }
    if (timings?.mbu) {
      $("mbu").textContent = `${(timings.mbu * 100).toFixed(0)} %`;
      this.#share(timings.mbu);
    }
  }

  #share(part) {
    const bar = $("mbu-bar");
    bar.setAttribute("aria-valuenow", (part * 100).toFixed(0));
    bar.firstElementChild.style.transform = `scaleX(${Math.min(1, part)})`;
  }
}
