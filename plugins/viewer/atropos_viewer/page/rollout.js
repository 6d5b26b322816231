// One rollout: its figures, and its conversation with tool calls.

import { el, plain, show } from "./dom.js";

export function rewardClass(correct, failed) {
  return failed ? "bad" : correct === true ? "good" : correct === false ? "poor" : "";
}

export function factsOf(one, openGroup) {
  const outcome = one.failed ? "failed" : one.correct === true ? "right" : one.correct === false ? "wrong" : null;
  const rows = [
    ["reward", show(one.reward)],
    ...Object.entries(one.parts).filter(([, value]) => Object.keys(one.parts).length > 1 || value !== one.reward).map(([name, value]) => [`reward ${name}`, show(value)]),
    ...Object.entries(one.metrics ?? {}).map(([name, value]) => [name, show(value)]),
    ["outcome reward", show(one.outcome_reward)],
    ["advantage", show(one.advantage)],
    ...(one.rescored ?? []).flatMap((again) => [[`reward, rescored ${again.name}`, show(again.reward)], [`advantage, rescored ${again.name}`, show(again.advantage)]]),
    ["outcome", outcome],
    ["expected answer", one.answer],
    ["finish", one.finish],
    ["tokens", show(one.count)],
    ["versions", one.versions?.length ? one.versions.join(", ") : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "–");
  return el("div", {},
    el("dl", { class: "facts" }, rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    (one.rescored ?? []).filter((again) => again.turned).map((again) => el("p", { class: "out" }, `With ${again.name}, an advantage of its group changes its sign.`)),
    one.left_out ? el("p", { class: "out" }, `Its group was left out of training: ${one.left_out}.`) : null,
    one.draw !== null && one.draw !== undefined ? el("p", {}, el("button", { class: "link", onclick: () => openGroup(one.draw) }, "The whole group side by side")) : null);
}

// What the policy could call, as it was told.
export function toolsOf(tools) {
  if (!tools?.length) return null;
  return el("details", { class: "tools" }, el("summary", {}, "Tools", el("span", { class: "count" }, tools.length)), tools.map((tool) => {
    const { name, description, parameters } = tool?.function ?? tool ?? {};
    return el("div", { class: "call" }, el("strong", {}, plain(name ?? "?")), description ? ` ${plain(description)}` : null, el("pre", {}, JSON.stringify(parameters ?? {}, null, 1)));
  }));
}

// `turnRewards`: of each message the turn reward that it earned, or null; empty if there are none.
export function conversation(messages, turnRewards = []) {
  return el("ol", { class: "conversation", "aria-label": "conversation" }, messages.map((message, at) => el("li", { class: `turn ${roleClass(message.role)}` },
    el("div", { class: "role" }, plain(message.role ?? "?"), message.name ? ` ${plain(message.name)}` : "", message.tool_call_id ? el("span", { class: "soft" }, ` answers ${plain(message.tool_call_id)}`) : null, turnReward(turnRewards[at])),
    message.reasoning_content ? el("div", { class: "said soft" }, plain(message.reasoning_content)) : null,
    contentOf(message.content),
    (Array.isArray(message.tool_calls) ? message.tool_calls : []).map(toolCall))));
}

function turnReward(value) {
  return value === null || value === undefined ? null : el("span", { class: "turn-reward" }, ` turn reward ${show(value)}`);
}

function contentOf(content) {
  if (content === null || content === undefined || content === "") return null;
  if (typeof content === "string") return el("div", { class: "said" }, content);
  if (Array.isArray(content)) return content.map((part) => el("div", { class: "said" }, typeof part?.text === "string" ? part.text : JSON.stringify(part)));
  return el("div", { class: "said" }, JSON.stringify(content));
}

function toolCall(call) {
  const named = call?.function ?? call ?? {};
  const given = typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments ?? {}, null, 1);
  return el("div", { class: "call" }, el("span", { class: "role" }, "calls "), el("strong", {}, plain(named.name ?? "?")), call?.id ? el("span", { class: "soft" }, ` ${plain(call.id)}`) : null, el("pre", {}, given));
}

function roleClass(role) {
  return ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
}
