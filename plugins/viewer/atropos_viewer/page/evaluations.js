// The held-out problems, before and after: which figures rose, which fell, and what was said.

import { debounced, el, fill, show } from "./dom.js";
import { List } from "./list.js";

const CHANGES = { "": "all problems", rose: "rose", fell: "fell", right: "right in both", wrong: "wrong in both", same: "same in both", cut: "cut off after", failed: "failed after" };

export class Evaluations {
  constructor(app) {
    this.app = app;
    const pick = (label, change) => el("select", { "aria-label": label, onchange: change });
    this.before = pick("before", () => this.chosen({}));
    this.after = pick("after", () => this.chosen({}));
    this.change = el("select", { "aria-label": "change", onchange: () => this.chosen({}) }, Object.entries(CHANGES).map(([value, text]) => el("option", { value }, text)));
    this.text = el("input", { type: "search", placeholder: "Search problems and replies", "aria-label": "Search problems and replies", oninput: debounced(() => this.chosen({})) });
    this.summary = el("div", { class: "summary" });
    this.flags = el("ul", { class: "insights", "aria-label": "what went wrong" });
    this.count = el("span", { class: "count", role: "status" });
    this.list = new List({ label: "problems", rowHeight: 52, draw: (row, at) => this.drawRow(row, this.kept[at]), open: (at) => this.chosen({ problem: this.kept[at].after }, false), isOpen: () => this.opened !== undefined });
    this.detail = el("div", { class: "detail", tabindex: -1, role: "region", "aria-label": "one problem" });
    this.detail.addEventListener("keydown", (event) => { if (event.key === "Escape") this.back(); });
    this.panes = el("div", { class: "panes" }, this.list.element, this.detail);
    this.element = el("section", { class: "evaluations", "aria-label": "evaluation" },
      el("div", { class: "bar" }, el("label", {}, "before ", this.before), el("label", {}, "after ", this.after), this.text, this.change, this.count), this.summary, this.flags, this.panes);
    this.kept = [];
  }

  options() {
    return this.app.runs.flatMap((run, at) => run.evaluations.map((step) => ({ at, step, name: `${this.app.runs.length > 1 ? `${run.name}, ` : ""}step ${step}`, value: `${at}/${step}` })));
  }

  update() {
    if (this.options().map((one) => one.value).join() !== this.offered) this.enter(this.values());
  }

  focus() {
    this.list.box.focus();
  }

  // All that is chosen here, as an address has it; what was not chosen follows the run.
  values() {
    const problem = this.opened;
    return { before: this.picked?.before, after: this.picked?.after, change: this.change.value, text: this.text.value.trim(), problem };
  }

  // Something is chosen: into the address, and shown. A problem that is opened can be left by going back.
  chosen(more, replace = true) {
    const shown = Object.fromEntries(["before", "after"].map((name) => [name, this[name].value === this.followed?.[name] ? undefined : this[name].value]));
    this.picked = shown;
    const values = { ...this.values(), problem: undefined, ...more };
    this.app.go("evaluations", values, replace);
    if (replace) this.enter(Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined).map(([name, value]) => [name, String(value)])));
  }

  async enter(values) {
    const entered = (this.entered = {});
    this.change.value = values.change ?? "";
    if (document.activeElement !== this.text) this.text.value = values.text ?? "";
    const options = this.options();
    if (!options.length) {
      fill(this.flags);
      fill(this.summary, el("p", { class: "empty" }, "No evaluation is recorded: `evaluation.problems` of the run file says how many problems a run keeps for it."));
      this.list.set(0);
      return;
    }
    const key = options.map((one) => one.value).join();
    if (key !== this.offered) for (const select of [this.before, this.after]) fill(select, options.map((one) => el("option", { value: one.value }, one.name)));
    this.offered = key;
    const own = options.filter((one) => one.at === options[0].at); // the first run's own, before and after
    this.followed = { before: own[0].value, after: own.at(-1).value };
    this.picked = { before: values.before, after: values.after };
    for (const name of ["before", "after"]) {
      const known = options.some((one) => one.value === values[name]);
      this[name].value = known ? values[name] : this.followed[name];
    }
    const both = `${this.before.value} ${this.after.value}`;
    if (both !== this.read && !(await this.readBoth(entered))) return;
    this.read = both;
    const filtered = JSON.stringify([both, this.change.value, this.text.value]);
    if (filtered !== this.filtered) this.filter();
    this.filtered = filtered;
    this.opened = undefined;
    const one = this.rows.find((row) => String(row.after) === values.problem);
    if (one) {
      this.opened = one.after;
      if (this.kept.includes(one)) this.list.choose(this.kept.indexOf(one), false);
      this.drawDetail(one);
    } else {
      this.panes.classList.remove("opened");
      fill(this.detail, el("p", { class: "empty" }, "Choose a problem: Enter or a click opens it."));
    }
  }

  // Whether both evaluations are there, and still wanted.
  async readBoth(entered) {
    try {
      const both = await Promise.all([this.before, this.after].map((select) => {
        const [run, step] = select.value.split("/");
        return this.app.source.get(`runs/${run}/evaluations/${step}`);
      }));
      if (entered !== this.entered) return false;
      [this.first, this.second] = both;
    } catch (error) {
      fill(this.flags);
      fill(this.summary, el("p", { class: "empty", role: "alert" }, error.message, " ", error.remedy ?? ""));
      this.list.set(0);
      this.read = undefined;
      return false;
    }
    this.isGraded = this.graded();
    this.join();
    this.drawSummary();
    return true;
  }

  join() {
    const key = (table, at) => `${table.environment[at]}\n${table.task[at]}`;
    const before = new Map(this.first.task.map((_, at) => [key(this.first, at), at]));
    this.rows = this.second.task.map((_, at) => ({ after: at, before: before.get(key(this.second, at)) }));
  }

  // Accuracy, or where scores do not say what is right, the reward.
  share(table, at) {
    if (at === undefined) return null;
    return this.isGraded ? (table.total[at] ? (table.correct[at] ?? 0) / table.total[at] : null) : table.reward[at];
  }

  graded() {
    return [this.first, this.second].every((table) => table.correct.every((one, at) => one !== null || table.failed[at]) && table.correct.some((one) => one !== null));
  }

  figure(share) {
    return this.isGraded ? percent(share) : share === null ? "–" : show(share, 3);
  }

  changeOf({ before, after }) {
    const [from, to] = [this.share(this.first, before), this.share(this.second, after)];
    if (from === null || to === null) return "";
    if (to !== from) return to > from ? "rose" : "fell";
    return !this.isGraded || (to > 0 && to < 1) ? "same" : to ? "right" : "wrong";
  }

  drawSummary() {
    const counts = { rose: 0, fell: 0, right: 0, wrong: 0, same: 0 };
    for (const row of this.rows) {
      const change = this.changeOf(row);
      if (change) counts[change] += 1;
    }
    this.drawFlags(counts);
    const both = this.rows.filter((row) => row.before !== undefined);
    const mean = (table, side) => {
      const values = both.map((row) => this.share(table, row[side])).filter((one) => one !== null);
      return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
    };
    fill(this.summary,
      el("p", {}, el("span", { class: "soft" }, this.isGraded ? "accuracy " : "reward "),
        el("strong", { class: "figure" }, this.figure(mean(this.first, "before"))), " → ", el("strong", { class: "figure" }, this.figure(mean(this.second, "after"))),
        el("span", { class: "soft" }, ` of the ${show(both.length)} problems in both; `), el("span", { class: "good" }, `${show(counts.rose)} rose`), ", ", el("span", { class: "poor" }, `${show(counts.fell)} fell`),
        el("span", { class: "soft" }, `, ${this.isGraded ? `${show(counts.right)} right in both, ${show(counts.wrong)} wrong in both, ` : ""}${show(counts.same)} the same in both`)));
  }

  // What a reader should look at first, each a way to these problems.
  drawFlags(counts) {
    const all = this.rows.length;
    const [cut, cutBefore, failed] = [this.rows.filter((one) => this.is(one, "cut")).length, this.first.cut.filter((one) => one).length, this.rows.filter((one) => this.is(one, "failed")).length];
    const flag = (change, name, text) => el("li", { class: "flag" }, el("button", { class: "link", onclick: () => { this.change.value = change; this.chosen({}); } }, name), ` ${text}`);
    fill(this.flags,
      counts.fell ? flag("fell", `${show(counts.fell)} fell`, this.isGraded ? "right more often before than after" : "less reward after than before") : null,
      cut ? flag("cut", `${show(cut)} cut off`, `of ${show(all)} replies reached max_tokens; ${show(cutBefore)} before`) : null,
      failed ? flag("failed", `${show(failed)} failed`, `of ${show(all)} problems`) : null);
  }

  is(one, change) {
    if (change === "cut") return this.second.cut[one.after] > 0;
    if (change === "failed") return Boolean(this.second.failed[one.after]);
    return this.changeOf(one) === change;
  }

  filter() {
    if (!this.rows) return;
    const wanted = this.text.value.trim().toLowerCase();
    const has = ({ before, after }) => !wanted || [this.second.task[after], this.second.question[after], this.second.reply[after], before === undefined ? "" : this.first.reply[before]].some((text) => text.toLowerCase().includes(wanted));
    this.kept = this.rows.filter((row) => (!this.change.value || this.is(row, this.change.value)) && has(row));
    this.count.textContent = `${show(this.kept.length)} of ${show(this.rows.length)} problems`;
    this.list.set(this.kept.length);
  }

  drawRow(row, one) {
    const change = this.changeOf(one);
    row.append(
      el("span", { class: `reward ${change === "rose" || change === "right" ? "good" : change === "fell" || change === "wrong" ? "poor" : ""}` }, `${this.figure(this.share(this.first, one.before))} → ${this.figure(this.share(this.second, one.after))}`),
      el("span", { class: "main" }, el("span", { class: "preview" }, this.second.question[one.after].replaceAll(/\s+/g, " ").slice(0, 160)),
        el("span", { class: "under" }, `${this.second.task[one.after]}${change && change !== "fell" ? ` · ${CHANGES[change]}` : ""}`,
          [["fell", "fell"], ["cut", "cut off"], ["failed", "failed"]].filter(([name]) => this.is(one, name)).map(([, title]) => el("span", { class: "out" }, ` · ${title}`)))));
  }

  drawDetail(one) {
    const side = (title, table, at) => el("article", {}, el("h3", {}, title),
      at === undefined ? el("p", { class: "empty" }, "not in this evaluation") : [
        el("p", { class: "soft" }, table.correct[at] !== null ? `${table.correct[at]} of ${table.total[at]} right, reward ${show(table.reward[at])}` : `reward ${show(table.reward[at])}`,
          table.cut[at] ? el("span", { class: "out" }, table.total[at] > 1 ? `, ${table.cut[at]} cut off` : ", cut off") : null),
        table.failed[at] ? el("p", { class: "problem" }, table.failed[at]) : el("div", { class: "said" }, table.reply[at] || "(no text)")]);
    this.panes.classList.add("opened");
    fill(this.detail, el("button", { class: "back", onclick: () => this.back() }, "‹ List"),
      el("h2", {}, this.second.task[one.after], el("span", { class: "soft" }, ` ${this.second.environment[one.after]}`)),
      el("div", { class: "said question" }, this.second.question[one.after]),
      el("div", { class: "members two" }, side(`before: ${this.before.selectedOptions[0].textContent}`, this.first, one.before), side(`after: ${this.after.selectedOptions[0].textContent}`, this.second, one.after)));
    this.detail.focus({ preventScroll: true });
  }

  back() {
    if (this.opened === undefined) return;
    this.opened = undefined;
    this.panes.classList.remove("opened");
    this.app.go("evaluations", this.values(), true);
    this.list.box.focus();
  }
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share > 0 && share < 1 ? 1 : 0)} %`;
}
