// Colours Python while it streams: text comes in pieces of any size, and what is given out is never
// taken back. Only the last word is held until something follows it, since `de` may become `def`.

const KEYWORDS = new Set(
  ("and as assert async await break class continue def del elif else except finally for from " +
    "global if import in is lambda match nonlocal not or pass raise return try while with yield " +
    "True False None").split(" "),
);
const BUILTINS = new Set(
  ("abs all any bool bytes callable chr dict dir divmod enumerate Exception filter float format " +
    "frozenset getattr hasattr hash id input int isinstance issubclass iter KeyError len list " +
    "map max min next object open ord pow print property range repr reversed round self set " +
    "setattr slice sorted staticmethod str sum super tuple type TypeError ValueError vars zip"
  ).split(" "),
);
const WORD = /[A-Za-z_\u0080-\uffff][\w\u0080-\uffff]*/y;
const NUMBER =
  /0[xX][\da-fA-F_]+|0[bBoO][0-7_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d*)?[jJ]?/y;
/** A number that may go on: `0x` is none yet. */
const OPEN = /[\w.]+/y;
const PLAIN = /[^\w"'#@.\u0080-\uffff]+|[.@]/y;
const PREFIX = /^(?:[rRbBuUfF]|[rR][bBfF]|[bBfF][rR])$/;
const CODE = /^\s*(?:def|class|import|from|async|@|#!|"""|''')/;

export class Highlighter {
  #emit;
  #state;
  #quote = "";
  #defining = false;
  #decorating = false;
  #member = false;
  #held = "";
  #fresh = true;

  /**
   * @param {(kind: string, text: string) => void} emit takes each finished part
   * @param {"code"|"answer"} what an answer may be prose with fenced code, or code from its start
   */
  constructor(emit, what) {
    this.#emit = emit;
    this.#state = what === "code" ? this.#code : this.#opening;
  }

  /** The end of the text so far that is not coloured yet. */
  get held() {
    return this.#held;
  }

  /** Takes the next piece; `last` gives out what is held. */
  write(piece, last = false) {
    const text = this.#held + piece;
    let at = 0;
    while (at < text.length) {
      const next = this.#state(text, at, last);
      if (next === at) break;
      at = next;
    }
    this.#held = text.slice(at);
  }

  // Each state takes text from `at` on and returns where it came to; `at` itself asks for more.

  #opening(text, at, last) {
    const first = text.slice(at).trimStart();
    if (!last && first.length < 12 && !/\s/.test(first)) return at;
    this.#state = CODE.test(first) ? this.#code : this.#prose;
    return this.#state(text, at, last);
  }

  #prose(text, at, last) {
    if (this.#fresh) {
      const line = text.slice(at);
      if (!last && line.length < 3 && "```".startsWith(line)) return at;
      if (line.startsWith("```")) return this.#fence(text, at, last, this.#code);
    }
    const end = text.indexOf("\n", at);
    this.#fresh = end >= 0;
    const next = end < 0 ? text.length : end + 1;
    this.#emit("prose", text.slice(at, next));
    return next;
  }

  #fence(text, at, last, state) {
    const end = text.indexOf("\n", at);
    if (end < 0 && !last) return at;
    this.#state = state;
    this.#fresh = true;
    const next = end < 0 ? text.length : end + 1;
    this.#emit("comment", text.slice(at, next));
    return next;
  }

  #code(text, at, last) {
    const char = text[at];
    if (char === "`" && this.#fresh) return this.#closing(text, at, last);
    if (char === "#") {
      this.#state = this.#comment;
      return this.#comment(text, at);
    }
    if (char === '"' || char === "'") return this.#open(text, at, at, last);
    WORD.lastIndex = NUMBER.lastIndex = PLAIN.lastIndex = at;
    const word = WORD.exec(text)?.[0];
    if (word) return this.#word(text, at, word, last);
    const number = NUMBER.exec(text)?.[0];
    if (number) {
      const end = at + number.length;
      OPEN.lastIndex = at;
      OPEN.exec(text);
      if ((end === text.length || OPEN.lastIndex === text.length) && !last) return at;
      this.#emit("number", number);
      this.#fresh = false;
      return end;
    }
    if (char === "." && at + 1 === text.length && !last) return at;
    const plain = PLAIN.exec(text)?.[0] ?? char;
    const fence = plain.indexOf("`", 1);
    const taken = fence > 0 ? plain.slice(0, fence) : plain;
    this.#decorating = taken === "@" ? this.#fresh : this.#decorating && taken === ".";
    this.#member = taken === ".";
    this.#fresh = /\n[ \t]*$/.test(taken) || (this.#fresh && !taken.trim());
    this.#emit(this.#decorating ? "name" : "", taken);
    return at + taken.length;
  }

  #closing(text, at, last) {
    const rest = text.slice(at, at + 3);
    if (rest.length < 3 && !last) return at;
    if (rest === "```") return this.#fence(text, at, last, this.#prose);
    this.#emit("", "`");
    this.#fresh = false;
    return at + 1;
  }

  #word(text, at, word, last) {
    const end = at + word.length;
    if (end === text.length && !last) return at;
    const after = text[end];
    if ((after === '"' || after === "'") && PREFIX.test(word)) {
      return this.#open(text, at, end, last);
    }
    const names = this.#defining || this.#decorating;
    let kind = names || after === "(" ? "name" : "";
    if (!names && !this.#member && KEYWORDS.has(word)) kind = "keyword";
    else if (!names && !this.#member && BUILTINS.has(word)) kind = "builtin";
    this.#emit(kind, word);
    this.#defining = word === "def" || word === "class";
    this.#decorating = this.#decorating && after === ".";
    this.#member = false;
    this.#fresh = false;
    if (this.#defining && after === " ") {
      this.#emit("", " ");
      return end + 1;
    }
    return end;
  }

  #open(text, at, quoteAt, last) {
    const quote = text[quoteAt];
    const three = text.slice(quoteAt, quoteAt + 3);
    // Two quotes at the end may be an empty string or two thirds of three.
    if (three.length < 3 && three === quote.repeat(three.length) && !last) return at;
    this.#quote = three === quote.repeat(3) ? three : quote;
    const end = quoteAt + this.#quote.length;
    this.#emit("string", text.slice(at, end));
    this.#state = this.#string;
    this.#fresh = false;
    return end;
  }

  #string(text, at, last) {
    let end = at;
    while (end < text.length) {
      if (text[end] === "\\") {
        if (end + 1 === text.length && !last) break;
        end += 2;
      } else if (text.startsWith(this.#quote, end)) {
        end += this.#quote.length;
        this.#state = this.#code;
        break;
      } else if (text[end] === "\n" && this.#quote.length === 1) {
        this.#state = this.#code; // no string of one quote goes over a line's end
        break;
      } else if (text[end] === this.#quote[0] && text.length - end < 3 && !last) {
        break;
      } else {
        end += 1;
      }
    }
    end = Math.min(end, text.length);
    if (end > at) this.#emit("string", text.slice(at, end));
    // A string that ends at a line's end takes nothing itself: the code goes on from there.
    return end === at && this.#state === this.#code ? this.#code(text, at, last) : end;
  }

  #comment(text, at) {
    const end = text.indexOf("\n", at);
    if (end >= 0) this.#state = this.#code;
    if (end === at) return this.#code(text, at, false);
    this.#emit("comment", text.slice(at, end < 0 ? text.length : end));
    return end < 0 ? text.length : end;
  }
}
