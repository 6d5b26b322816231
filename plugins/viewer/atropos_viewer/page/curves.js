// A curve of every metric, grouped and searchable, all runs in each; health findings are marked on the curves that they judged.

import { debounced, el, fill, roving, show } from "./dom.js";
import { nearest } from "./rollouts.js";
import { Standouts } from "./standouts.js";

const FIRST = ["reward", "accuracy", "eval", "loss"]; // groups in this order, then by name
const FIRST_OF = ["reward/mean", "accuracy", "eval/accuracy", "loss"]; // within their group
const FOLDED = ["health", "time"];
const HEIGHT = 150;

export class Curves {
  constructor(app) {
    this.app = app;
    this.cards = new Map();
    this.wanted = "";
    this.search = el("input", { type: "search", placeholder: "Search metrics", "aria-label": "Search metrics",
      oninput: debounced(() => { this.wanted = this.search.value.trim().toLowerCase(); this.app.go("curves", this.values(), true); this.layout(); }) });
    this.count = el("span", { class: "count", role: "status" });
    this.findings = el("div", { class: "findings" });
    this.standouts = new Standouts(app);
    this.groups = el("div", { class: "groups" });
    this.element = el("section", { class: "curves", "aria-label": "curves" }, el("div", { class: "bar" }, this.search, this.count), this.findings, this.standouts.element, this.groups);
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.cards.get(entry.target.dataset.metric)?.draw();
    }, { rootMargin: "300px" });
    this.sync = window.uPlot.sync("steps");
  }

  enter(values) {
    this.wanted = (values.metric ?? "").toLowerCase();
    if (document.activeElement !== this.search) this.search.value = values.metric ?? "";
    this.layout();
    if (this.app.read) this.standouts.look();
  }

  values() {
    return { metric: this.search.value.trim() };
  }

  focus() {
    this.groups.querySelector("details[open] .card")?.focus();
  }

  update() {
    this.layout();
    for (const card of this.cards.values()) card.refresh();
    this.standouts.look();
  }

  restyle() {
    for (const card of this.cards.values()) card.forget();
    this.layout();
  }

  names() {
    const found = new Set();
    for (const at of this.app.shown) for (const name of Object.keys(this.app.tables[at].columns)) found.add(name);
    return [...found].sort();
  }

  layout() {
    this.drawFindings();
    const wanted = this.names().filter((name) => name.toLowerCase().includes(this.wanted));
    const key = `${this.app.read}\n${wanted.join("\n")}`;
    if (key === this.laid) return;
    this.laid = key;
    this.count.textContent = `${wanted.length} of ${this.names().length} metrics`;
    for (const [name, card] of this.cards) {
      if (!wanted.includes(name)) {
        card.close();
        this.cards.delete(name);
      }
    }
    const groups = new Map();
    for (const name of wanted.sort((a, b) => (FIRST_OF.includes(b) - FIRST_OF.includes(a)) || a.localeCompare(b))) {
      const group = groupOf(name);
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    const focused = document.activeElement?.dataset?.metric;
    const folded = new Map([...this.groups.querySelectorAll("details")].map((one) => [one.dataset.group, one.open]));
    fill(this.groups, [...groups].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b)).map(([group, names]) => {
      const grid = el("div", { class: "grid", role: "group", "aria-label": `${group}: ${names.length} curves` });
      for (const name of names) {
        if (!this.cards.has(name)) this.cards.set(name, new Card(this, name));
        grid.append(this.cards.get(name).element);
        this.seen.observe(this.cards.get(name).element);
      }
      roving(grid, ".card", { horizontal: false });
      const open = this.wanted !== "" || (folded.get(group) ?? !FOLDED.includes(group));
      return el("details", { open, "data-group": group }, el("summary", {}, group, el("span", { class: "count" }, names.length)), grid);
    }), wanted.length ? null : el("p", { class: "empty" }, this.names().length ? `No metric has “${this.wanted}” in its name.` : this.app.read ? "No step is recorded yet." : "Reading …"));
    if (focused) this.cards.get(focused)?.element.focus();
  }

  drawFindings() {
    const all = [...this.app.shown].flatMap((run) => this.app.tables[run].findings.map((one) => ({ ...one, run })));
    const key = JSON.stringify(all) + JSON.stringify(this.app.notices);
    if (key === this.found) return;
    this.found = key;
    fill(this.findings,
      (this.app.notices ?? []).map((text) => el("p", { class: "notice" }, text)),
      all.length ? el("ul", { "aria-label": "what the health checks found" }, all.map((one) => el("li", { class: one.state },
        el("span", { class: `swatch s${one.run % 8}`, "aria-hidden": "true" }),
        el("strong", {}, one.check.replaceAll("_", " ")),
        el("span", { class: "when" }, one.until === null ? `since step ${one.since}` : `steps ${one.since} to ${one.until}`),
        el("span", { class: "says" }, one.says, one.do ? el("span", { class: "remedy" }, ` ${one.do}`) : null),
        el("span", { class: "links" },
          one.metrics.length > 0 && el("button", { class: "link", onclick: () => this.app.go("curves", { metric: one.metrics[0] }) }, "curve"),
          this.stepAt(one.run, one.since) !== null && el("button", { class: "link", onclick: () => this.app.go("rollouts", { run: one.run, step: this.stepAt(one.run, one.since) }) }, "rollouts"))))) : null);
  }

  // The recorded step that is nearest.
  stepAt(run, step) {
    const steps = this.app.runs[run].rollouts;
    if (!steps.length) return null;
    return nearest(steps, step);
  }
}

function groupOf(name) {
  if (name === "accuracy") return "reward";
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "training";
}

function rank(group) {
  const at = FIRST.indexOf(group);
  if (FOLDED.includes(group)) return 100;
  return at < 0 ? FIRST.length : at;
}

class Card {
  constructor(owner, name) {
    this.owner = owner;
    this.name = name;
    this.value = el("span", { class: "value" });
    this.plot = el("div", { class: "plot" });
    this.element = el("div", { class: "card", role: "img", tabindex: -1, "data-metric": name, onkeydown: (event) => this.key(event) },
      el("div", { class: "title" }, el("span", { class: "metric" }, name), this.value), this.plot);
    this.resized = new ResizeObserver(() => {
      if (this.chart && this.plot.clientWidth && this.chart.width !== this.plot.clientWidth) this.chart.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    });
    this.resized.observe(this.plot);
    this.describe();
  }

  runs() {
    return [...this.owner.app.shown].sort((a, b) => a - b).filter((at) => this.owner.app.tables[at].columns[this.name]);
  }

  // One list of steps for all runs, and of each run its values there.
  data() {
    const runs = this.runs();
    const tables = runs.map((at) => this.owner.app.tables[at]);
    const steps = [...new Set(tables.flatMap((table) => table.steps.filter((_, i) => known(table.columns[this.name][i]))))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, i) => [step, i]));
    const series = tables.map((table) => {
      const values = new Array(steps.length).fill(null);
      table.steps.forEach((step, i) => {
        const value = table.columns[this.name][i];
        if (known(value)) values[place.get(step)] = value;
      });
      return values;
    });
    return [steps, ...series];
  }

  marks() {
    return this.runs().flatMap((run) => this.owner.app.tables[run].findings.filter((one) => one.metrics.includes(this.name) || (this.name === "reward/mean" && one.state === "ill")).map((one) => ({ ...one, run })));
  }

  draw() {
    if (this.chart) return;
    this.drawn = this.runs().join();
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--faint").trim();
    const line = style.getPropertyValue("--line").trim();
    const font = `11px ${style.getPropertyValue("--sans")}`;
    const runs = this.runs();
    const data = this.data();
    const dots = data[0].length < 40;
    this.chart = new window.uPlot({
      width: Math.max(this.plot.clientWidth, 120), height: HEIGHT, legend: { show: false }, padding: [6, 8, 0, 0],
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      axes: [
        { stroke: ink, font, size: 26, grid: { stroke: line, width: 1 }, ticks: { show: false }, values: (_, all) => all.map((one) => (Number.isInteger(one) ? show(one) : "")) },
        { stroke: ink, font, size: 54, grid: { stroke: line, width: 1 }, ticks: { show: false }, values: (_, all) => all.map((one) => show(one, 3)) },
      ],
      series: [{}, ...runs.map((at) => ({
        stroke: style.getPropertyValue(`--run${at % 8}`).trim(), width: 1.6, spanGaps: true, points: { show: dots, size: 4 },
      }))],
      hooks: { drawClear: [(chart) => this.shade(chart)], setCursor: [(chart) => this.read(chart.cursor.idx)] },
    }, data, this.plot);
    this.owner.sync.sub(this.chart);
    this.chart.over.addEventListener("click", () => this.openStep(this.chart.cursor.idx));
    this.describe();
  }

  // Spans of steps in which a check was ill.
  shade(chart) {
    const style = getComputedStyle(document.documentElement);
    const { ctx, bbox } = chart;
    for (const mark of this.marks()) {
      const steps = this.owner.app.tables[mark.run].steps;
      const from = chart.valToPos(mark.since, "x", true);
      const to = chart.valToPos(mark.until ?? steps.at(-1) ?? mark.since, "x", true);
      const left = Math.max(bbox.left, Math.min(from, to));
      const right = Math.min(bbox.left + bbox.width, Math.max(to, left + 3));
      ctx.save();
      ctx.fillStyle = style.getPropertyValue(mark.state === "ill" ? "--ill" : "--suspect").trim();
      ctx.globalAlpha = 0.16;
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
      ctx.globalAlpha = 0.9;
      ctx.fillRect(left, bbox.top, 2 * devicePixelRatio, bbox.height);
      ctx.restore();
    }
  }

  refresh() {
    if (!this.chart) return;
    if (this.runs().join() !== this.drawn) {
      this.forget();
      this.draw();
      return;
    }
    this.chart.setData(this.data());
    this.describe();
  }

  read(at) {
    if (at === null || at === undefined) {
      this.describe();
      return;
    }
    const data = this.chart.data;
    if (at >= data[0].length) return;
    fill(this.value, el("span", { class: "at" }, `step ${show(data[0][at])} `), this.runs().map((run, i) => el("span", { class: `of t${run % 8}` }, show(data[i + 1][at]))));
  }

  describe() {
    const runs = this.runs();
    const lasts = runs.map((at) => {
      const values = this.owner.app.tables[at].columns[this.name].filter(known);
      return { at, first: values[0], last: values.at(-1) };
    });
    const marks = this.marks();
    fill(this.value, lasts.map(({ at, last }) => el("span", { class: `of t${at % 8}` }, show(last))));
    const said = lasts.map(({ at, first, last }) => `${this.owner.app.runs[at].name} from ${show(first)} to ${show(last)}`);
    const found = marks.map((one) => `${one.check} ${one.state} since step ${one.since}`);
    this.element.setAttribute("aria-label", [`${this.name}: ${said.join(", ")}`, ...found].join("; "));
    this.element.classList.toggle("marked", marks.length > 0);
  }

  // Left and right read the curve step by step; Enter opens the rollouts of the step.
  key(event) {
    if (event.target !== this.element || !this.chart) return;
    const count = this.chart.data[0].length;
    if (event.key === "Enter") {
      event.preventDefault();
      this.openStep(this.index ?? count - 1);
      return;
    }
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !count) return;
    event.preventDefault();
    this.index = Math.max(0, Math.min(count - 1, (this.index ?? count) + by));
    const value = this.chart.data.slice(1).map((one) => one[this.index]).find(known) ?? 0;
    this.chart.setCursor({ left: this.chart.valToPos(this.chart.data[0][this.index], "x"), top: this.chart.valToPos(value, "y") });
    this.read(this.index);
  }

  openStep(at) {
    if (at === null || at === undefined) return;
    const run = this.runs().find((one) => this.owner.app.runs[one].rollouts.length);
    if (run === undefined) return;
    this.owner.app.go("rollouts", { run, step: this.owner.stepAt(run, this.chart.data[0][at]) });
  }

  forget() {
    if (!this.chart) return;
    this.owner.sync.unsub(this.chart);
    this.chart.destroy();
    this.chart = undefined;
  }

  close() {
    this.forget();
    this.resized.disconnect();
    this.owner.seen.unobserve(this.element);
  }
}

function known(value) {
  return value !== null && value !== undefined;
}
