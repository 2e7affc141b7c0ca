// One streamed request, as the page sees it: a worker reads, the page takes what has come when it
// draws a frame.

/**
 * Why a request gave no answer, or none to its end. `kind` is loading, key, busy, network, lost or
 * refused; `status`, `param` and `retryAfterS` are the server's where it gave them.
 */
export class Failure extends Error {
  constructor({ message, ...more }) {
    super(message);
    Object.assign(this, more);
  }
}

/** A reader that waits for the next request: to start one takes longer than a first token. */
let spare = newReader();

function newReader() {
  return new Worker("reader.js", { type: "module" });
}

export class TokenStream {
  #wake;
  #worker = null;
  #pieces = [];
  #ended = false;

  /** What the last chunks told: token counts, the engine's timings, why it ended, the seed. */
  usage = null;
  timings = null;
  finishReason = null;
  seed = null;
  /** Set once nothing more will come. */
  done = false;
  /** The reason, where the stream ended in a failure. */
  failure = null;
  startedAt = 0;

  /** @param {() => void} wake called when there is something to drain */
  constructor(wake) {
    this.#wake = wake;
  }

  /** Sends the request; resolves when the answer's headers are here, throws a `Failure` before. */
  open(path, body, headers) {
    this.#worker = spare;
    spare = newReader();
    return new Promise((resolve, reject) => {
      let open = false;
      this.#worker.onmessage = ({ data }) => {
        if (data.open) {
          open = true;
          resolve();
        } else if (data.done && !open) {
          this.#close();
          reject(new Failure(data.failure));
        } else this.#take(data);
      };
      this.startedAt = performance.now();
      this.#worker.postMessage({
        path: new URL(path, document.baseURI).href,
        body,
        headers,
        timeOrigin: performance.timeOrigin,
      });
    });
  }

  #take({ batch, told, done, failure }) {
    if (this.#ended) return;
    if (batch) {
      for (const piece of batch) this.#pieces.push(piece);
      for (const [name, value] of Object.entries(told)) this[name] = value ?? this[name];
    }
    if (done) {
      this.failure = failure && new Failure(failure);
      this.#close();
      this.#ended = true;
    }
    this.#wake();
  }

  /** Everything since the last call, as `{at, text}`: one entry a chunk with text. */
  drain() {
    const pieces = this.#pieces;
    this.#pieces = [];
    this.done ||= this.#ended;
    return pieces;
  }

  /** Ends it: the connection is closed. */
  abort() {
    this.#ended = true;
    this.#close();
  }

  /** Ends it with a failure that came before any answer. */
  fail(failure) {
    this.failure = failure;
    this.#ended = true;
    this.#wake();
  }

  #close() {
    this.#worker?.terminate();
    this.#worker = null;
  }
}
