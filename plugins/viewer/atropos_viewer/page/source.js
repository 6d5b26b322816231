// Where records come from: the server that sent this page, or the page itself where it is one file. Both know the same addresses.

export class Refused extends Error {
  constructor(message, remedy) {
    super(message);
    this.remedy = remedy ?? "";
  }
}

class Served {
  constructor(token) {
    this.token = token;
    this.follows = true;
  }

  async get(address, query = {}) {
    let answer;
    try {
      answer = await fetch(`/records/${address}?${new URLSearchParams(query)}`, {
        headers: { authorization: `Bearer ${this.token}` },
        signal: AbortSignal.timeout(30000),
      });
    } catch {
      throw new Refused("the server does not answer: `atropos view` has ended.", "Start it again and open its new address.");
    }
    const value = await answer.json();
    if (!answer.ok) throw new Refused(value.message ?? value.error?.message ?? `status ${answer.status}`, value.remedy);
    return value;
  }

  // With the token: for another tab of this machine, or after the browser forgot it.
  address() {
    return `${location.origin}/${location.hash || "#curves"}&token=${this.token}`;
  }

  search(run, step, text) {
    return this.get(`runs/${run}/rollouts/${step}/search`, { text });
  }
}

class Embedded {
  constructor() {
    this.follows = false;
    this.kept = new Map();
  }

  address() {
    return location.href;
  }

  async get(address) {
    const [, run, kind, step, row] = address.split("/");
    if (kind === "rollouts" && row !== undefined) {
      return (await this.read(`runs/${run}/details/${step}`))[Number(row)];
    }
    return this.read(address);
  }

  async search(run, step, text) {
    const wanted = text.toLowerCase();
    const details = await this.read(`runs/${run}/details/${step}`);
    const said = (one) => [one.task, one.failed, ...one.messages.map((message) => JSON.stringify(message.content) + JSON.stringify(message.tool_calls))];
    const escaped = JSON.stringify(wanted).slice(1, -1);
    return details.filter((one) => said(one).join("\n").toLowerCase().includes(escaped)).map((one) => one.at);
  }

  async read(address) {
    if (!this.kept.has(address)) {
      const block = [...document.querySelectorAll('script[type="application/gzip"]')].find((one) => one.dataset.address === address);
      if (!block) throw new Refused(`this file does not have ${address}.`, "It was left out to keep the file small: look at the run itself.");
      this.kept.set(address, unpacked(block.textContent));
    }
    return this.kept.get(address);
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

export function openSource() {
  if (document.querySelector('script[type="application/gzip"]')) return new Embedded();
  const [place, given] = location.hash.split(/[#&]token=/);
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + place);
  }
  return new Served(sessionStorage.getItem("token") ?? "");
}
