// Where the time went: of each step in stages, and of the whole run as its summary has it.

import { el, fill, show } from "./dom.js";

const STAGES = ["waiting", "trainer", "publishing", "probe", "packing", "evaluation", "checkpoint", "health", "start-up"];

export class Times {
  constructor(app) {
    this.app = app;
    this.element = el("section", { class: "times", "aria-label": "where the time went" });
  }

  enter() {
    this.update();
  }

  update() {
    fill(this.element, [...this.app.shown].sort((a, b) => a - b).map((at) => this.run(at)));
  }

  restyle() {}

  focus() {
    this.element.querySelector(".scroll")?.focus();
  }

  run(at) {
    const { name, times, config, directory } = this.app.runs[at];
    const stages = times.length ? times.filter((one) => one.kind === "stage") : this.summed(at);
    const calls = times.filter((one) => one.kind !== "stage");
    const most = Math.max(...stages.map((one) => one.seconds), 1e-9);
    const whole = stages.reduce((sum, one) => sum + one.seconds, 0);
    return el("article", {},
      el("h2", {}, el("span", { class: `swatch s${at % 8}`, "aria-hidden": "true" }), name),
      el("p", { class: "soft" }, times.length ? `${duration(whole)} in all; the run's own summary.` : `${duration(whole)} so far, summed over the recorded steps: the run has not ended.`),
      table(`stages of ${name}`, stages, most, whole),
      calls.length > 0 && [el("h3", {}, "Calls"), el("p", { class: "soft" }, "They overlap each other and the stages: seconds in which at least one was in flight."), table(`calls of ${name}`, calls, Math.max(...calls.map((one) => one.seconds), 1e-9), whole)],
      el("details", {}, el("summary", {}, "Run file"), el("p", { class: "soft" }, directory), el("pre", { tabindex: 0, "aria-label": "run file" }, config)));
  }

  summed(at) {
    const { columns } = this.app.tables[at];
    const sums = [];
    for (const [metric, values] of Object.entries(columns)) {
      const stage = /^time\/(.+)_s$/.exec(metric)?.[1];
      if (!stage || !(STAGES.includes(stage) || /^(transform|teacher|sink)\/[^/]+$/.test(stage))) continue;
      const kept = values.filter((one) => one !== null);
      sums.push({ name: stage, seconds: kept.reduce((sum, one) => sum + one, 0), calls: kept.length });
    }
    return sums.sort((a, b) => b.seconds - a.seconds);
  }
}

function table(label, rows, most, whole) {
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, el("table", {},
    el("thead", {}, el("tr", {}, ["", "seconds", "share", "calls", "p50", "p95", ""].map((text) => el("th", { scope: "col" }, text)))),
    el("tbody", {}, [...rows].sort((a, b) => b.seconds - a.seconds).map((one) => el("tr", {},
      el("th", { scope: "row" }, one.name), el("td", {}, show(one.seconds, 3)), el("td", {}, whole ? `${(100 * one.seconds / whole).toFixed(1)} %` : "–"),
      el("td", {}, show(one.calls)), el("td", {}, show(one.p50_s, 3)), el("td", {}, show(one.p95_s, 3)),
      el("td", { class: "track" }, el("span", { class: "fill", style: { width: `${(100 * one.seconds) / most}%` } })))))));
}

function duration(seconds) {
  if (seconds < 120) return `${show(seconds, 3)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
