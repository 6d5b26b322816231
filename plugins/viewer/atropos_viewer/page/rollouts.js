// The rollouts of one step: what stands out, a list to search and filter, by rollout or by group, and one of them in full.

import { debounced, el, fill, show } from "./dom.js";
import { insights, nameOf } from "./insights.js";
import { List } from "./list.js";
import { Marks } from "./marks.js";
import { conversation, factsOf, rewardClass, toolsOf } from "./rollout.js";
import { TokenView } from "./tokens.js";

const OUTCOMES = { "": "any outcome", right: "right", wrong: "wrong", failed: "failed", cut: "cut off", out: "left out of training", masked: "masked tokens", turned: "an advantage changes its sign" };
const ORDERS = { recorded: "as recorded", reward: "highest reward", low: "lowest reward", tokens: "longest", short: "shortest", advantage: "largest advantage" };

export class Rollouts {
  constructor(app) {
    this.app = app;
    this.run = 0;
    this.groups = false;
    this.pinned = null;
    const again = debounced(() => this.chosen());
    const pick = (label, options) => el("select", { "aria-label": label, onchange: () => this.chosen() }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
    const bound = (label, placeholder) => el("input", { class: "bound", type: "text", inputmode: "decimal", "aria-label": label, placeholder, oninput: again });
    this.runPick = el("select", { "aria-label": "run", onchange: () => this.app.go("rollouts", { ...this.filters(), run: this.runPick.value }) });
    this.stepBox = el("input", { class: "step", type: "text", inputmode: "numeric", "aria-label": "step", onchange: () => this.goStep(Number(this.stepBox.value)) });
    this.slider = el("input", { type: "range", min: 0, "aria-label": "recorded step", oninput: debounced(() => this.goStep(this.steps()[Number(this.slider.value)]), 80) });
    this.marks = new Marks((step) => this.goStep(nearest(this.steps(), step)));
    this.of = el("span", { class: "count" });
    this.previous = el("button", { "aria-label": "previous recorded step", onclick: () => this.move(-1) }, "‹");
    this.next = el("button", { "aria-label": "next recorded step", onclick: () => this.move(1) }, "›");
    this.text = el("input", { type: "search", placeholder: "Search texts and tasks", "aria-label": "Search texts and tasks", oninput: again });
    this.environment = pick("environment", { "": "any environment" });
    this.outcome = pick("outcome", OUTCOMES);
    this.order = pick("order", ORDERS);
    this.rescored = pick("rescored", {});
    this.rescored.hidden = true;
    this.task = el("input", { type: "text", class: "task-filter", placeholder: "Task", "aria-label": "task", oninput: again });
    [this.rewardFrom, this.rewardTo] = [bound("lowest reward", "reward ≥"), bound("highest reward", "reward ≤")];
    [this.tokensFrom, this.tokensTo] = [bound("least tokens", "tokens ≥"), bound("most tokens", "tokens ≤")];
    this.byGroup = el("button", { "aria-pressed": "false", onclick: () => { this.groups = !this.groups; this.chosen(); } }, "By group");
    this.more = el("button", { class: "narrow", "aria-expanded": "false", onclick: () => this.more.setAttribute("aria-expanded", String(this.filterBar.classList.toggle("all"))) }, "Filters");
    // What the list is filtered and ordered by, under the names that an address has for it.
    this.controls = {
      text: this.text, task: this.task, environment: this.environment, outcome: this.outcome, reward_from: this.rewardFrom, reward_to: this.rewardTo,
      tokens_from: this.tokensFrom, tokens_to: this.tokensTo, order: this.order, rescored: this.rescored,
    };
    this.filtered = JSON.stringify(this.filters());
    this.count = el("span", { class: "count", role: "status" });
    this.facts = el("ul", { class: "insights", "aria-label": "what stands out in this step" });
    this.list = new List({
      label: "rollouts", rowHeight: 52,
      draw: (row, at) => (this.groups ? this.drawGroup(row, this.kept[at]) : this.drawRow(row, this.kept[at])),
      open: (at) => this.app.go("rollouts", this.at(this.placeOf(at))),
      isOpen: () => this.panes.classList.contains("opened"),
      moved: debounced((at) => this.glance(at), 90),
    });
    this.detail = el("div", { class: "detail", tabindex: -1, role: "region", "aria-label": "one rollout" });
    this.panes = el("div", { class: "panes" }, this.list.element, this.detail);
    this.element = el("section", { class: "rollouts", "aria-label": "rollouts" },
      el("div", { class: "bar steps" }, this.runPick, el("span", { class: "label", "aria-hidden": "true" }, "step"), this.previous, this.stepBox, this.next, el("span", { class: "slide" }, this.slider, this.marks.element), this.of, this.marks.legend),
      this.facts,
      (this.filterBar = el("div", { class: "bar filters" }, this.text, this.more, this.task, this.environment, this.outcome, el("span", { class: "pair" }, this.rewardFrom, this.rewardTo), el("span", { class: "pair" }, this.tokensFrom, this.tokensTo), this.order, this.rescored, this.byGroup, this.count)),
      this.panes);
    this.detail.addEventListener("keydown", (event) => { if (event.key === "Escape") this.back(); });
  }

  steps() {
    return this.app.runs[this.run].rollouts;
  }

  // All that is chosen here, as an address has it.
  values() {
    return this.at(this.opened ?? {});
  }

  at(opened) {
    const { colour, branch, replay } = this.tokens ?? {};
    const pin = this.pinned ? [this.pinned.run, this.pinned.step, this.pinned.draw].join(".") : undefined;
    return { run: this.run, step: this.step, ...this.filters(), colour, replay, branch: opened.row !== undefined && String(opened.row) === String(this.opened?.row) ? branch : undefined, pin, ...opened };
  }

  filters() {
    const found = Object.entries(this.controls).map(([name, control]) => [name, control.value.trim()]);
    return { ...Object.fromEntries(found.filter(([name, value]) => value && value !== this.usual(name))), ...(this.groups ? { by: "group" } : {}) };
  }

  // The value of a control that an address leaves out.
  usual(name) {
    return { order: "recorded", rescored: this.table?.rescored?.[0].name }[name] ?? "";
  }

  // What `atropos rescore` made of this step, under the chosen name.
  get scores() {
    return this.table?.rescored?.find((one) => one.name === this.rescored.value);
  }

  offerRescored(values) {
    const names = (this.table.rescored ?? []).map((one) => one.name);
    const chosen = names.includes(values) ? values : names[0] ?? "";
    fill(this.rescored, names.map((name) => el("option", { value: name }, `rescored: ${name}`)));
    this.rescored.value = chosen;
    this.rescored.hidden = !names.length;
    const turned = [...this.outcome.options].find((one) => one.value === "turned");
    turned.hidden = turned.disabled = !names.length;
  }

  // A filter or the order is another one.
  async chosen() {
    this.app.go("rollouts", this.values(), true);
    await this.filter();
  }

  setFilters(values) {
    if (values.environment) this.offerEnvironments([values.environment]);
    for (const [name, control] of Object.entries(this.controls)) {
      if (document.activeElement !== control) control.value = values[name] ?? this.usual(name);
    }
    this.groups = values.by === "group";
  }

  offerEnvironments(names) {
    const chosen = this.environment.value;
    fill(this.environment, el("option", { value: "" }, "any environment"), [...new Set([...names, ...(chosen ? [chosen] : [])])].map((name) => el("option", { value: name }, name)));
    this.environment.value = chosen;
  }

  focus() {
    this.list.box.focus();
  }

  async enter(values) {
    const run = Number(values.run ?? this.run);
    this.run = run in this.app.runs ? run : 0;
    this.setFilters(values);
    this.wantedScores = values.rescored;
    this.tokens = { colour: values.colour, branch: values.branch, replay: values.replay };
    this.drawSteps();
    const steps = this.steps();
    if (!steps.length) {
      this.empty("This run has recorded no rollouts yet.", "`rollouts_every` of [sink.jsonl] says of which steps they are recorded.");
      return;
    }
    const wanted = values.step === undefined ? (this.shownRun === this.run && this.step) || steps.at(-1) : Number(values.step);
    try {
      await this.read(this.run, wanted);
      await this.pin(values.pin);
      await this.openOne(values);
      if (values.step === undefined && this.app.view === this) this.app.go("rollouts", this.values(), true);
    } catch (error) {
      this.empty(error.message, error.remedy ?? "");
    }
  }

  empty(message, remedy) {
    this.table = undefined;
    fill(this.facts);
    this.kept = [];
    this.list.set(0);
    this.count.textContent = "";
    fill(this.detail, el("p", { class: "empty", role: "alert" }, message, remedy ? [" ", remedy] : null));
    this.panes.classList.add("opened");
  }

  async read(run, step) {
    if (this.table && this.shownRun === run && this.step === step) {
      if (JSON.stringify(this.filters()) !== this.filtered) await this.filter();
      return;
    }
    this.table = undefined;
    this.shownRun = run;
    this.step = step;
    this.drawSteps();
    this.panes.classList.remove("opened");
    fill(this.detail, el("p", { class: "empty" }, "Choose a rollout: Enter or a click opens it."));
    const table = await this.app.source.get(`runs/${run}/rollouts/${step}`);
    if (this.shownRun !== run || this.step !== step) return;
    this.table = table;
    this.offerRescored(this.wantedScores);
    this.offerEnvironments(table.environment.names);
    const found = insights(table, this.app.runs[run].max_staleness);
    fill(this.facts, table.notices.map((text) => el("li", { class: "notice" }, text)), [...found.filter((one) => one.flag), ...found.filter((one) => !one.flag)].map((one) => el("li", { class: one.flag ? "flag" : "" },
      el("span", { class: "name" }, one.name), " ", el("span", {}, one.text))));
    await this.filter();
  }

  drawSteps() {
    const steps = this.steps();
    fill(this.runPick, this.app.runs.map((run, at) => el("option", { value: at }, run.name)));
    this.runPick.value = String(this.run);
    this.runPick.hidden = this.app.runs.length < 2;
    const at = Math.max(0, steps.indexOf(this.step));
    this.slider.max = String(Math.max(0, steps.length - 1));
    this.slider.value = String(at);
    this.marks.draw(steps, this.app.runs[this.run], this.app.tables[this.run].findings);
    this.slider.setAttribute("aria-valuetext", `step ${this.step ?? ""}${this.marks.said(this.step)}`);
    if (document.activeElement !== this.stepBox) this.stepBox.value = this.step === undefined ? "" : String(this.step);
    this.of.textContent = steps.length ? `${at + 1} of ${steps.length} recorded` : "none recorded";
    this.previous.disabled = at === 0;
    this.next.disabled = at >= steps.length - 1;
  }

  // More steps are there; the one that is looked at stays, unless it was the newest and nothing in it is open.
  update() {
    if (!this.app.runs[this.run]) return;
    const steps = this.steps();
    this.drawSteps();
    if (!this.table && this.step === undefined && steps.length) this.enter({});
  }

  goStep(step) {
    if (Number.isFinite(step)) this.app.go("rollouts", { ...this.at({}), step });
  }

  move(by) {
    const steps = this.steps();
    const to = steps[steps.indexOf(this.step) + by];
    if (to !== undefined) this.goStep(to);
  }

  back() {
    if (!this.panes.classList.contains("opened")) return;
    this.panes.classList.remove("opened");
    this.opened = undefined;
    this.app.go("rollouts", this.values(), true);
    this.list.box.focus();
  }

  async filter() {
    const table = this.table;
    const chosen = Object.values(this.filters()).length;
    this.more.textContent = chosen ? `Filters (${chosen})` : "Filters";
    this.byGroup.setAttribute("aria-pressed", String(this.groups));
    if (!table) return;
    this.filtered = JSON.stringify(this.filters());
    const text = this.text.value.trim();
    const asked = (this.asked = (this.asked ?? 0) + 1);
    const found = text ? new Set(await this.app.source.search(this.run, this.step, text)) : null;
    if (asked !== this.asked || table !== this.table) return;
    const task = this.task.value.trim().toLowerCase();
    const within = (value, from, to) => (from.value.trim() === "" || (value !== null && value >= Number(from.value))) && (to.value.trim() === "" || (value !== null && value <= Number(to.value)));
    const rows = [];
    for (let at = 0; at < table.count; at++) {
      if (found && !found.has(at)) continue;
      if (task && !nameOf(table.task, at).toLowerCase().includes(task)) continue;
      if (this.environment.value && nameOf(table.environment, at) !== this.environment.value) continue;
      if (!this.hasOutcome(at)) continue;
      if (!within(table.reward[at], this.rewardFrom, this.rewardTo) || !within(table.tokens[at], this.tokensFrom, this.tokensTo)) continue;
      rows.push(at);
    }
    const low = (value) => value ?? Infinity;
    const high = (value) => value ?? -Infinity;
    const by = {
      reward: (a, b) => high(table.reward[b]) - high(table.reward[a]), low: (a, b) => low(table.reward[a]) - low(table.reward[b]),
      tokens: (a, b) => high(table.tokens[b]) - high(table.tokens[a]), short: (a, b) => low(table.tokens[a]) - low(table.tokens[b]),
      advantage: (a, b) => high(table.advantage[b]) - high(table.advantage[a]),
    }[this.order.value];
    if (by) rows.sort((a, b) => by(a, b) || a - b);
    this.kept = this.groups ? this.gathered(rows) : rows;
    this.count.textContent = this.groups ? `${show(this.kept.length)} groups` : `${show(rows.length)} of ${show(table.count)} rollouts`;
    this.list.set(this.kept.length);
  }

  hasOutcome(at) {
    const table = this.table;
    switch (this.outcome.value) {
      case "right": return table.correct[at] === true;
      case "wrong": return table.correct[at] === false;
      case "failed": return nameOf(table.failed, at) !== "";
      case "cut": return nameOf(table.finish, at) === "length";
      case "out": return nameOf(table.left_out, at) !== "";
      case "turned": return this.scores?.turned[at] === true;
      case "masked": return Boolean(table.trained) && nameOf(table.left_out, at) === "" && table.trained[at] !== null && table.trained[at] < table.tokens[at];
      default: return true;
    }
  }

  gathered(rows) {
    const groups = new Map();
    for (const at of rows) {
      const draw = this.table.draw[at];
      if (!groups.has(draw)) groups.set(draw, []);
      groups.get(draw).push(at);
    }
    return [...groups].map(([draw, members]) => ({ draw, members }));
  }

  drawRow(row, at) {
    const table = this.table;
    const failed = nameOf(table.failed, at);
    const out = nameOf(table.left_out, at);
    row.append(
      el("span", { class: `reward ${rewardClass(table.correct[at], failed)}` }, failed ? "failed" : show(table.reward[at], 3), this.now(this.scores?.reward[at])),
      el("span", { class: "main" },
        el("span", { class: "preview" }, failed || table.preview[at] || "(no text)"),
        el("span", { class: "under" }, nameOf(table.task, at), table.environment.names.length > 1 ? ` · ${nameOf(table.environment, at)}` : "",
          ` · ${show(table.tokens[at])} tokens`, table.turns[at] > 1 ? ` · ${table.turns[at]} turns` : "",
          table.correct[at] === null ? "" : table.correct[at] ? " · right" : " · wrong",
          nameOf(table.finish, at) === "length" ? " · cut off" : "",
          table.advantage[at] === null ? "" : ` · advantage ${show(table.advantage[at], 3)}`,
          this.scores && this.scores.advantage[at] !== table.advantage[at] ? ` → ${show(this.scores.advantage[at], 3)}` : "",
          this.scores?.turned[at] ? el("span", { class: "out" }, " · sign changes") : "",
          !out && table.trained && table.trained[at] !== null && table.trained[at] < table.tokens[at] ? el("span", { class: "out" }, ` · ${show(table.tokens[at] - table.trained[at])} masked`) : "",
          out ? el("span", { class: "out" }, " · left out") : "")));
  }

  // A reward that was computed again, after the recorded one.
  now(reward) {
    return this.scores ? el("span", { class: "rescored" }, ` → ${show(reward, 3)}`) : null;
  }

  drawGroup(row, { members }) {
    const table = this.table;
    const out = nameOf(table.left_out, members[0]);
    const rewards = members.map((at) => table.reward[at]).filter((one) => one !== null);
    const average = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
    const again = members.map((at) => this.scores?.reward[at] ?? null).filter((one) => one !== null);
    row.append(
      el("span", { class: "reward" }, show(average, 3), this.now(again.length ? again.reduce((sum, one) => sum + one, 0) / again.length : null)),
      el("span", { class: "main" },
        el("span", { class: "chips", role: "img", "aria-label": `rewards ${members.map((at) => show(table.reward[at], 3)).join(", ")}` },
          members.slice(0, 48).map((at) => el("span", { class: `chip ${rewardClass(table.correct[at], nameOf(table.failed, at))}` }, nameOf(table.failed, at) ? "×" : show(table.reward[at], 2)))),
        el("span", { class: "under" }, nameOf(table.task, members[0]), ` · ${members.length} rollouts`, out ? el("span", { class: "out" }, ` · left out: ${out}`) : " · trained",
          this.scores?.turned[members[0]] ? el("span", { class: "out" }, " · an advantage changes its sign") : "")));
  }

  placeOf(at) {
    return this.groups ? { group: this.kept[at].draw } : { row: this.kept[at] };
  }

  // Arrows in the list take an open rollout along, and stay in the list.
  async glance(at) {
    if (!this.panes.classList.contains("opened") || this.kept[at] === undefined || document.activeElement !== this.list.box) return;
    this.app.go("rollouts", this.at(this.placeOf(at)), true);
    await this.openOne(this.placeOf(at), false);
  }

  async openOne(values, focus = true) {
    const wanted = (this.wanted = {}); // what comes late, of a place that was left, is not shown
    this.opened = values.row !== undefined ? { row: values.row } : values.group !== undefined ? { group: values.group } : undefined;
    if (!this.table) return;
    if (!this.opened) this.panes.classList.remove("opened");
    if (values.row !== undefined) {
      const at = Number(values.row);
      const one = await this.app.source.get(`runs/${this.run}/rollouts/${this.step}/${at}`);
      if (wanted !== this.wanted) return;
      const place = this.groups ? this.kept.findIndex((group) => group.members.includes(at)) : this.kept.indexOf(at);
      if (place >= 0) this.list.choose(place, false);
      this.drawDetail(one, focus);
    } else if (values.group !== undefined) {
      const group = await this.members(this.table, this.run, this.step, Number(values.group));
      if (wanted !== this.wanted) return;
      const place = this.groups ? this.kept.findIndex((one) => one.draw === group.draw) : -1;
      if (place >= 0) this.list.choose(place, false);
      this.drawMembers(group, focus);
    }
  }

  async members(table, run, step, draw) {
    const rows = [...Array(table.count).keys()].filter((at) => table.draw[at] === draw);
    return { run, step, draw, all: await Promise.all(rows.map((at) => this.app.source.get(`runs/${run}/rollouts/${step}/${at}`))) };
  }

  // `run.step.draw` of an address: the group that stays above.
  async pin(place) {
    if (place === undefined) this.pinned = null;
    if (place === undefined || place === (this.pinned && [this.pinned.run, this.pinned.step, this.pinned.draw].join("."))) return;
    const [run, step, draw] = place.split(".").map(Number);
    const table = run === this.run && step === this.step ? this.table : await this.app.source.get(`runs/${run}/rollouts/${step}`);
    const group = await this.members(table, run, step, draw);
    this.pinned = group.all.length ? group : null;
  }

  open(focus, ...content) {
    this.panes.classList.add("opened");
    fill(this.detail, el("button", { class: "back", onclick: () => this.back() }, "‹ List"), content);
    this.detail.scrollTop = 0;
    if (focus && !document.activeElement?.matches("input, select")) this.detail.focus({ preventScroll: true });
  }

  drawDetail(one, focus) {
    this.detail.setAttribute("aria-label", `rollout ${one.at} of step ${this.step}`);
    this.open(focus,
      el("h2", {}, one.task, el("span", { class: "soft" }, ` ${one.environment}, step ${this.step}, rollout ${one.at}`)),
      factsOf(one, (draw) => this.app.go("rollouts", this.at({ group: draw }))),
      one.notices.map((text) => el("p", { class: "notice" }, text)),
      one.failed ? el("p", { class: "problem" }, one.where ? `${one.where}: ` : "", one.failed) : null,
      one.sequences.length ? new TokenView(one, this.tokens, (tokens) => { this.tokens = tokens; this.app.go("rollouts", this.values(), true); }).element : null,
      toolsOf(one.tools),
      conversation(one.messages, one.turn_rewards));
  }

  // The members of a group side by side; a group that was pinned stays above.
  drawMembers(group, focus = true) {
    const columns = (one) => el("section", { class: "group", "aria-label": `group of task ${one.all[0].task}` },
      el("h2", {}, one.all[0].task, el("span", { class: "soft" }, ` step ${one.step}, ${one.all.length} rollouts, ${one.all[0].left_out ? `left out: ${one.all[0].left_out}` : "trained"}`),
        el("button", { class: "pin", "aria-pressed": String(this.pinned === one), onclick: () => { this.pinned = this.pinned === one ? null : one; this.app.go("rollouts", this.values(), true); this.drawMembers(group); } }, this.pinned === one ? "Unpin" : "Pin to compare")),
      el("div", { class: "members", tabindex: 0, role: "region", "aria-label": "rollouts side by side" }, one.all.map((member) => el("article", {},
        el("h3", {}, el("span", { class: `reward ${rewardClass(member.correct, member.failed)}` }, member.failed ? "failed" : show(member.reward, 3)),
          (member.rescored ?? []).map((again) => el("span", { class: "rescored" }, ` ${again.name}: ${show(again.reward, 3)}`)),
          el("button", { class: "link", onclick: () => this.app.go("rollouts", { ...this.at({ row: member.at }), run: one.run, step: one.step }) }, `rollout ${member.at}`)),
        member.failed ? el("p", { class: "problem" }, member.failed) : membersTurns(member)))));
    const opening = group.all[0].messages.filter((message) => message.role === "user").slice(0, 1);
    this.detail.setAttribute("aria-label", `group of task ${group.all[0].task}`);
    this.open(focus, this.pinned && this.pinned !== group ? columns(this.pinned) : null, columns(group), conversation(opening));
  }
}

export function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
}

// The conversation of one member, without what all members have in common.
function membersTurns(member) {
  const own = member.messages.map((message, at) => [message, member.turn_rewards[at]]).filter(([message]) => message.role !== "system").slice(1);
  return conversation(own.map(([message]) => message), own.map(([, value]) => value));
}
