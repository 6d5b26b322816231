// What stands out in the rollouts of a run, over its recorded steps: the lines of each step that are flagged, above the curves.

import { el, fill, show } from "./dom.js";
import { insights } from "./insights.js";

const MOST_STEPS = 16; // that are looked at, of each run

export class Standouts {
  constructor(app) {
    this.app = app;
    this.seen = new Map(); // of each run, by step: its flagged lines
    this.element = el("div", { class: "standouts" });
  }

  // One step after the other, and only while the curves are on the screen: a table of ten thousand rollouts takes a second to read.
  async look() {
    if (this.looking) {
      this.draw();
      return;
    }
    this.looking = true;
    for (const run of [...this.app.shown].sort((a, b) => a - b)) {
      const seen = this.seen.get(run) ?? new Map();
      this.seen.set(run, seen);
      for (const step of looked(this.app.runs[run])) {
        if (seen.has(step)) continue;
        if (!this.element.isConnected) break;
        try {
          const table = await this.app.source.get(`runs/${run}/rollouts/${step}`);
          seen.set(step, insights(table, this.app.runs[run].max_staleness).filter((one) => one.flag));
        } catch (error) {
          seen.set(step, [{ name: "records", text: error.message }]);
        }
        this.draw();
      }
    }
    this.looking = false;
    this.draw();
  }

  draw() {
    fill(this.element, [...this.app.shown].sort((a, b) => a - b).map((run) => this.drawRun(run)));
  }

  drawRun(run) {
    const seen = this.seen.get(run) ?? new Map();
    const all = this.app.runs[run].rollouts.length;
    if (!seen.size) return null;
    const byName = new Map();
    for (const step of [...seen.keys()].sort((a, b) => a - b)) {
      for (const { name, text } of seen.get(step)) byName.set(name, [...(byName.get(name) ?? []), { step, text }]);
    }
    const of = `${seen.size === all ? `all ${show(all)}` : `${show(seen.size)} of ${show(all)}`} recorded steps`;
    const who = this.app.runs.length > 1 ? `${this.app.runs[run].name}: ` : "";
    const swatch = () => el("span", { class: `swatch s${run % 8}`, "aria-hidden": "true" });
    return [
      el("p", { class: "count" }, `${who}${byName.size ? "what stands out" : "nothing stands out"} in the rollouts of ${of}`),
      byName.size ? el("ul", { "aria-label": `${who}what stands out in the rollouts` }, [...byName].map(([name, found]) => el("li", { class: "suspect" },
        swatch(),
        el("strong", {}, name),
        el("span", { class: "when" }, found.length === 1 ? `step ${found[0].step}` : `${found.length} steps, ${found[0].step} to ${found.at(-1).step}`),
        el("span", { class: "says" }, found.at(-1).text),
        el("span", { class: "links" }, el("button", { class: "link", onclick: () => this.app.go("rollouts", { run, step: found.at(-1).step }) }, "rollouts"))))) : null,
    ];
  }
}

// Evenly spaced, the same ones as the run goes on; the last of a run that has ended is among them.
function looked(run) {
  const steps = run.rollouts;
  let stride = 1;
  while (steps.length / stride > MOST_STEPS) stride *= 2;
  const found = steps.filter((_, at) => at % stride === 0);
  if (!run.living && steps.length && !found.includes(steps.at(-1))) found.push(steps.at(-1));
  return found;
}
