// Text on the page that only ever grows. Blocks of lines are laid out by themselves, so that a
// frame lays out the last block and not the whole answer.

import { Highlighter } from "./highlight.js";

const LINES_A_BLOCK = 64;
const BOTTOM_PX = 32;

export class CodeView {
  #root;
  #scroller;
  #block;
  #tail;
  #last;
  #lines;
  #highlighter;
  #following = true;

  /** `root` gets the text, `scroller` follows it unless someone scrolled up. */
  constructor(root, scroller) {
    this.#root = root;
    this.#scroller = scroller;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.reset("answer");
  }

  /** Empties the view. `before` is text that comes before what will be written, not shown. */
  reset(what, before = "") {
    this.#root.replaceChildren();
    this.#following = true;
    this.#tail = null;
    this.#openBlock();
    let shown = false;
    this.#highlighter = new Highlighter((kind, text) => shown && this.#append(kind, text), what);
    this.#highlighter.write(before);
    this.#highlighter.write("", true);
    shown = true;
  }

  /** Adds text; the caller calls `follow` once a frame. */
  write(text) {
    this.#tail?.remove();
    this.#highlighter.write(text);
    // A new node each time: one that wandered along with the text would count as a layout shift.
    this.#tail = document.createTextNode(this.#highlighter.held);
    this.#block.append(this.#tail);
  }

  /** Colours what was held back. */
  end() {
    this.#tail?.remove();
    this.#tail = null;
    this.#highlighter.write("", true);
  }

  /** Scrolls to the end, unless someone scrolled away from it. */
  follow() {
    if (this.#following) this.#scroller.scrollTop = 1e9;
  }

  // Asked once a scroll, not once a frame: the answer costs a layout.
  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    this.#following = scrollHeight - scrollTop - clientHeight < BOTTOM_PX;
  }

  #append(kind, text) {
    let from = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", end + 1)) {
      this.#lines += 1;
      if (this.#lines < LINES_A_BLOCK) continue;
      this.#part(kind, text.slice(from, end + 1));
      this.#openBlock();
      from = end + 1;
    }
    if (from < text.length) this.#part(kind, text.slice(from));
  }

  #part(kind, text) {
    if (this.#last?.kind === kind) {
      this.#last.node.appendData(text);
      return;
    }
    const node = document.createTextNode(text);
    let child = node;
    if (kind) {
      child = document.createElement("span");
      child.className = kind;
      child.append(node);
    }
    this.#block.append(child);
    this.#last = { kind, node };
  }

  #openBlock() {
    this.#block = document.createElement("div");
    this.#root.append(this.#block);
    this.#last = null;
    this.#lines = 0;
  }
}
