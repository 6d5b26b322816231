// Keys of the whole page, and the list of them under `?`, with the address of what is shown.

import { el } from "./dom.js";

const VIEWS = { c: ["curves", "Curves"], r: ["rollouts", "Rollouts"], e: ["evaluations", "Evaluation"], t: ["times", "Time"] };
const OFF = "keys off"; // in the browser's storage: for who dictates, or types by one key

export class Keys {
  constructor(app) {
    this.app = app;
    this.address = el("input", { type: "text", readonly: true, "aria-label": "address of what is shown", onfocus: () => this.address.select() });
    this.on = el("input", { type: "checkbox", checked: !stored(), onchange: () => store(!this.on.checked) });
    this.button = el("button", { class: "help", "aria-label": "keys and address", "aria-haspopup": "dialog", onclick: () => this.open() }, "?");
    this.dialog = el("dialog", { "aria-label": "keys" },
      el("h2", {}, "Keys"),
      el("dl", { class: "keys" }, this.list().map(([keys, text]) => el("div", {}, el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, text)))),
      el("label", {}, this.on, " keys of one letter"),
      el("h2", {}, "Address"),
      el("p", { class: "soft" }, "Opens what is shown: run, step, filters, what is open and its colours.", app.source.follows ? " On this machine, as long as `atropos view` runs." : ""),
      this.address,
      el("form", { method: "dialog" }, el("button", {}, "Close")));
  }

  list() {
    return [
      ...Object.entries(VIEWS).map(([key, [, title]]) => [key, title]),
      ["l", "The list, or the curves"], ["/", "Search"], ["[ ]", "The recorded step before, and after"], ["k j", "The row above, and below: opens it"],
      ["g", "By group, or each rollout"], ["Esc", "Back to the list"], ["Tab ← →", "From part to part; within a list, tabs, a curve, tokens"], ["?", "This list"],
    ];
  }

  open() {
    if (this.dialog.open) return;
    this.address.value = this.app.source.address();
    this.dialog.showModal();
  }

  pressed(event) {
    if (event.key === "Escape" && !this.dialog.open && event.target === document.body) this.app.view.back?.();
    if (event.altKey || event.ctrlKey || event.metaKey || this.dialog.open || event.target.matches?.("input:not([type=checkbox], [type=range]), select, textarea")) return;
    const { view } = this.app;
    const does = {
      ...Object.fromEntries(Object.entries(VIEWS).map(([key, [name]]) => [key, () => this.app.show(name)])),
      "?": () => this.open(), l: () => view.focus(), "/": () => (view.text ?? view.search)?.focus(),
      "[": () => view.move?.(-1), "]": () => view.move?.(1), j: () => view.list?.step(1), k: () => view.list?.step(-1), g: () => view.byGroup?.click(),
    }[event.key];
    if (!does || (!this.on.checked && event.key !== "?")) return;
    event.preventDefault();
    does();
  }
}

function stored() {
  try {
    return localStorage.getItem(OFF) !== null;
  } catch {
    return false; // a browser that keeps nothing
  }
}

function store(off) {
  try {
    if (off) localStorage.setItem(OFF, "1");
    else localStorage.removeItem(OFF);
  } catch {} // it holds until the page is left
}
