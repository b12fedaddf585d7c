// How messages look. Text from the model is only ever text.

const SOURCES = {
  target: "written by the model",
  mtp: "drafted by the MTP block, accepted",
  dspark: "drafted by DSpark, accepted",
  ngram: "copied from the text (n-gram), accepted",
  model: "drafted by the draft model, accepted",
};

export function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export function button(className, text, onclick) {
  const made = element("button", className, text);
  made.type = "button";
  made.onclick = onclick;
  return made;
}

export const textOf = (message) => message.pieces.map(([text]) => text).join("");

const wordsOf = (source) => SOURCES[source] ?? `drafted by ${source}, accepted`;
const inLegend = new Set();

function nameInLegend(source) {
  if (inLegend.has(source)) return;
  inLegend.add(source);
  document.getElementById("legend").append(element("span", `token ${source}`, wordsOf(source)), " ");
}

function token([text, source]) {
  if (!source) return document.createTextNode(text);
  const made = element("span", `token ${source}`, text);
  made.title = wordsOf(source);
  nameInLegend(source);
  return made;
}

/** A message on the page, and what adds to it. */
export class Shown {
  constructor(message) {
    this.message = message;
    this.article = element("article", message.role);
    this.reasoning = element("details", "reasoning");
    this.thought = element("div", "text");
    this.reasoning.append(element("summary", "", "Reasoning"), this.thought);
    this.text = element("div", "text");
    this.note = element("p", "note");
    this.article.append(this.reasoning, this.text, this.note);
    this.draw();
  }

  draw() {
    const { reasoning, pieces } = this.message;
    this.thought.textContent = reasoning ?? "";
    this.reasoning.hidden = !reasoning;
    this.text.replaceChildren(...pieces.map(token));
    this.drawNote();
  }

  drawNote() {
    const { role, note, refused, forgotten } = this.message;
    const leftOut = forgotten && role === "assistant" ? "not sent any more: the context is full" : "";
    this.note.textContent = note || leftOut;
    this.note.hidden = !this.note.textContent;
    this.article.classList.toggle("unsent", Boolean(refused || forgotten));
  }

  /** What an event of a stream brings. */
  add({ delta: { content, reasoning_content: thought }, token_source: source }) {
    if (thought) {
      this.message.reasoning += thought;
      this.thought.append(thought);
      this.reasoning.hidden = false;
    }
    if (content) {
      const piece = [content, source ?? ""];
      this.message.pieces.push(piece);
      this.text.append(token(piece));
    }
  }
}

// -- versions of an answer ------------------------------------------------------------------------

const version = ({ pieces, reasoning, note }) => ({ pieces, reasoning, note });
const isEmpty = ({ pieces, reasoning }) => !pieces.length && !reasoning;

/** Begins another version, and keeps those there are. */
export function beginVersion(message) {
  const versions = versionsOf(message);
  if (!isEmpty(message)) versions[message.at ?? 0] = version(message);
  Object.assign(message, { versions, at: versions.length, pieces: [], reasoning: "", note: "" });
}

export function versionsOf(message) {
  return message.versions ?? (isEmpty(message) ? [] : [version(message)]);
}

/** The version just written counts, unless nothing was written: then the one before stands again. */
export function endVersion(message) {
  if (!message.versions) return;
  if (!isEmpty(message)) message.versions[message.at] = version(message);
  else if (message.versions.length) turnTo(message, message.versions.length - 1, message.note);
}

export function turnTo(message, at, note = undefined) {
  Object.assign(message, message.versions[at], { at });
  if (note) message.note = note;
}
