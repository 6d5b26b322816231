// A list of any length, of which only the rows in sight are there. One row takes Tab; arrows move, Enter opens.

import { el } from "./dom.js";

const BEYOND = 8; // rows above and below what is in sight

export class List {
  // `draw(row, at)` fills an element; `open(at)` is called for a click and for Enter, `moved(at)` for an arrow. `isOpen()`: whether
  // a row is.
  constructor({ label, rowHeight, draw, open, moved, isOpen }) {
    Object.assign(this, { rowHeight, draw, open, moved, isOpen });
    this.count = 0;
    this.at = 0;
    this.space = el("div", { class: "list-space", role: "presentation" });
    this.box = el("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": label }, this.space);
    this.element = el("div", { class: "list-frame" }, this.box);
    this.rows = new Map();
    this.box.addEventListener("scroll", () => this.schedule(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("focus", () => this.mark());
    new ResizeObserver(() => this.schedule()).observe(this.box);
  }

  set(count, at = 0) {
    this.count = count;
    this.at = Math.max(0, Math.min(at, count - 1));
    this.space.style.height = `${count * this.rowHeight}px`;
    this.clear();
    this.paint();
  }

  clear() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
  }

  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.paint();
    });
  }

  paint() {
    const height = this.box.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - BEYOND);
    const last = Math.min(this.count, Math.ceil((this.box.scrollTop + height) / this.rowHeight) + BEYOND);
    for (const [at, row] of this.rows) {
      if (at < first || at >= last) {
        row.remove();
        this.rows.delete(at);
      }
    }
    for (let at = first; at < last; at++) {
      if (this.rows.has(at)) continue;
      const row = el("div", {
        class: "row", role: "option", id: `row-${at}`, "aria-selected": "false", "aria-posinset": at + 1, "aria-setsize": this.count,
        onclick: () => this.choose(at, true),
      });
      row.style.transform = `translateY(${at * this.rowHeight}px)`;
      row.style.height = `${this.rowHeight}px`;
      this.draw(row, at);
      this.rows.set(at, row);
      this.space.append(row);
    }
    this.mark();
  }

  mark() {
    for (const [at, row] of this.rows) row.setAttribute("aria-selected", String(at === this.at));
    if (this.rows.has(this.at)) this.box.setAttribute("aria-activedescendant", `row-${this.at}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  choose(at, opens) {
    if (!this.count) return;
    this.at = Math.max(0, Math.min(at, this.count - 1));
    const top = this.at * this.rowHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.rowHeight > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + this.rowHeight - this.box.clientHeight;
    this.paint();
    if (opens) this.open(this.at);
  }

  // To the row before or after, and open it.
  step(by) {
    this.choose(this.isOpen() ? this.at + by : this.at, true);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.count, End: this.count };
    if (event.key in moves && !event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      this.choose(this.at + moves[event.key], false);
      this.moved?.(this.at);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(this.at, true);
    }
  }
}
