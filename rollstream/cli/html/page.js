"use strict";
// Draws token strips, a piece of them at a time: a strip may have a million tokens, and elements
// are made for those near the view only. All text is put in as text, never as markup.
(() => {
  const PIECE = 512, AHEAD = "800px 0px";
  const NAMES = ["context", "sampled", "masked"];
  const json = (id) => {
    const holder = document.getElementById(id);
    return holder ? JSON.parse(holder.textContent) : null;
  };
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const pieces = json("pieces");

  // The run of `runs` ([start, end, …], in order) that has position i, or null.
  const at = (runs, i) => {
    let low = 0, high = runs.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1, run = runs[middle];
      if (i < run[0]) high = middle - 1;
      else if (i >= run[1]) low = middle + 1;
      else return run;
    }
    return null;
  };

  class Strip {
    constructor(name) {
      const held = json(name + "-data");
      this.held = held;
      this.ids = new Int32Array(bytes(held.ids));
      this.logProbs = held.lp === null ? null : new Float32Array(bytes(held.lp));
      this.root = document.getElementById(name + "-strip");
      this.root.replaceChildren();
      this.seen = new IntersectionObserver((entries) => {
        for (const entry of entries) {
          if (entry.isIntersecting) this.fill(entry.target);
          else this.empty(entry.target, entry.boundingClientRect.height);
        }
      }, { root: this.root, rootMargin: AHEAD });
      for (let start = 0; start < this.ids.length; start += PIECE) {
        const piece = document.createElement("div");
        piece.dataset.start = String(start);
        piece.style.minHeight = "190px";
        this.root.append(piece);
        if (start === 0) this.fill(piece);
        this.seen.observe(piece);
      }
      this.begin();
    }
    // Prompts are long: the view begins shortly before the first sampled token.
    begin() {
      const call = this.held.calls[0];
      if (!call || call[0] >= this.ids.length) return;
      const piece = this.root.children[Math.floor(call[0] / PIECE)];
      this.fill(piece);
      const token = piece.children[call[0] % PIECE];
      this.root.scrollTop = token.offsetTop - this.root.offsetTop - 90;
    }
    fill(piece) {
      if (piece.firstChild) return;
      const start = Number(piece.dataset.start);
      const end = Math.min(start + PIECE, this.ids.length);
      for (let i = start; i < end; i += 1) piece.append(this.token(i));
      piece.style.minHeight = "";
    }
    empty(piece, height) {
      if (!piece.firstChild || !height) return;
      piece.style.minHeight = height + "px";
      piece.replaceChildren();
    }
    token(i) {
      const { held } = this, id = this.ids[i];
      const text = pieces && pieces[id] !== undefined ? pieces[id] : null;
      const run = at(held.runs, i), call = at(held.calls, i), version = at(held.versions, i);
      const kind = run ? run[2] : 0;
      const told = [`#${i}  id ${id}` + (text === null ? "" : `  ${JSON.stringify(text)}`)];
      const where = i - held.prompt;
      if (call && this.logProbs && where >= 0) {
        const value = this.logProbs[where];
        told.push(`log-prob ${value.toPrecision(6)}  (p ${Math.exp(value).toPrecision(3)})`);
      }
      told.push(NAMES[kind] + (where < 0 ? ", prompt" : ""));
      if (version) told.push(version[2] < 0 ? "version unknown" : `version ${version[2]}`);
      if (call) {
        told.push(`turn ${call[5]}, call ${held.calls.indexOf(call)} (${call[4]})`);
        told.push(`${held.engines[call[2]]}  ${call[3]}`);
      }
      const token = document.createElement("s");
      token.className = "k" + kind + (call && call[0] === i ? " first" : "") +
        (text === null ? " id" : "");
      token.textContent = text === null ? String(id) : text.replace(/\n/g, "↵\n");
      token.title = told.join("\n");
      return token;
    }
  }

  const strips = new Map();
  const draw = (details) => {
    const name = details.dataset.strip;
    if (details.open && !strips.has(name)) strips.set(name, new Strip(name));
  };
  const all = () => document.querySelectorAll("details");
  for (const details of document.querySelectorAll("details[data-strip]")) {
    details.addEventListener("toggle", () => draw(details));
    draw(details);
  }
  const openAll = (open) => {
    for (const details of all()) {
      details.open = open;
      if (details.dataset.strip) draw(details);
    }
  };
  const buttons = document.querySelector(".buttons");
  for (const [label, open] of [["open all", true], ["close all", false]]) {
    const button = document.createElement("button");
    button.textContent = label;
    button.addEventListener("click", () => openAll(open));
    buttons.append(button);
  }
  // page.html#all opens everything, #tokens the strips of open members, #m3 opens member 3.
  const follow = () => {
    const name = location.hash.slice(1);
    if (name === "all") openAll(true);
    if (name === "tokens") {
      for (const details of document.querySelectorAll(".member[open] [data-strip]")) {
        details.open = true;
        draw(details);
      }
    }
    const target = name ? document.getElementById(name) : null;
    const holder = target && target.closest("details");
    if (holder) { holder.open = true; target.scrollIntoView(); }
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
