// The page: what is shown, and what happens at a click. Text from the model is only ever text.

import { loadChats, loadKey, loadSettings, saveChats, saveKey, saveSettings } from "./store.js";
import { Refusal, call, chat } from "./stream.js";
import { Meter, showSpeedUp } from "./strip.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "draft_max"];
const SOURCES = { target: "target", mtp: "MTP", dspark: "DSpark", ngram: "n-gram", model: "draft model" };

let chats = loadChats();
let settings = { colours: true, ...loadSettings() };
let key = loadKey();
let current = chats[0] ?? begin();
let running = null; // the AbortController of the answer that is being written

function begin() {
  const made = { id: Date.now(), messages: [] };
  chats.unshift(made);
  return made;
}

// -- showing ------------------------------------------------------------------------------------

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

const textOf = (message) => message.pieces.map(([text]) => text).join("");

const inLegend = new Set();

function nameInLegend(source) {
  if (inLegend.has(source)) return;
  inLegend.add(source);
  $("legend").append(element("span", `token ${source}`, SOURCES[source] ?? source), " ");
}

function token([text, source]) {
  const made = element("span", `token ${source}`, text);
  if (source) {
    made.title = SOURCES[source] ?? source;
    nameInLegend(source);
  }
  return made;
}

/** Shows a message; returns what is needed to add to it. */
function show(message) {
  const article = element("article", message.role);
  const reasoning = element("details", "reasoning");
  const thought = element("div", "text", message.reasoning ?? "");
  reasoning.append(element("summary", "", "Reasoning"), thought);
  reasoning.hidden = !message.reasoning;
  const text = element("div", "text");
  text.append(...message.pieces.map(token));
  const note = element("p", "note", message.note ?? "");
  note.hidden = !message.note;
  article.append(reasoning, text, note);
  $("log").append(article);
  return { article, reasoning, thought, text, note };
}

function showChat() {
  $("log").replaceChildren();
  current.messages.forEach(show);
  const last = $("log").lastElementChild;
  if (last?.classList.contains("assistant")) addActions(last);
  $("log").scrollTop = $("log").scrollHeight;
  const options = chats.map((one) => {
    const option = element("option", "", one.messages[0] ? textOf(one.messages[0]) : "New conversation");
    option.value = one.id;
    option.selected = one === current;
    return option;
  });
  $("chats").replaceChildren(...options);
}

/** Below the last answer: write it again, copy it. */
function addActions(article) {
  document.querySelectorAll(".actions").forEach((old) => old.remove());
  const actions = element("div", "actions");
  const again = element("button", "again", "Regenerate");
  again.type = "button";
  again.onclick = regenerate;
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  copy.onclick = () => navigator.clipboard?.writeText(textOf(current.messages.at(-1)));
  actions.append(again, copy);
  article.append(actions);
}

/** Scrolls along unless the reader has scrolled up. */
function following(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// -- asking -------------------------------------------------------------------------------------

function request() {
  const messages = current.messages
    .filter((message) => message.role === "user" || textOf(message))
    .map((message) => ({ role: message.role, content: textOf(message) }));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const body = { messages };
  for (const name of NUMBERS) {
    if (Number.isFinite(settings[name])) body[name] = settings[name];
  }
  return body;
}

async function answer() {
  const body = request();
  const asked = current;
  const message = { role: "assistant", pieces: [], reasoning: "" };
  asked.messages.push(message);
  const shown = show(message);
  shown.article.classList.add("writing");
  running = new AbortController();
  busy(true);
  const meter = new Meter();
  const timer = setInterval(() => showSpeedUp(key), 1000);
  try {
    for await (const event of chat(body, key, running.signal)) {
      const choice = event.choices[0];
      if (choice) following(() => add(message, shown, choice));
      if (choice) meter.add(choice);
      if (event.timings) meter.end(event.timings);
      if (choice?.finish_reason === "length") message.note = "stopped at the token limit";
    }
  } catch (error) {
    message.note = noteOf(error);
  } finally {
    clearInterval(timer);
    running = null;
    busy(false);
    shown.article.classList.remove("writing");
    shown.note.textContent = message.note ?? "";
    shown.note.hidden = !message.note;
    saveChats(chats);
    if (asked === current) following(() => addActions(shown.article));
    showSpeedUp(key);
  }
}

function add(message, shown, choice) {
  const { content, reasoning_content: thought } = choice.delta;
  if (thought) {
    message.reasoning += thought;
    shown.thought.append(thought);
    shown.reasoning.hidden = false;
  }
  if (content) {
    const piece = [content, choice.token_source ?? ""];
    message.pieces.push(piece);
    shown.text.append(token(piece));
  }
}

function noteOf(error) {
  if (error.name === "AbortError") return "stopped";
  if (error instanceof Refusal && error.status === 401) askForKey();
  return error.message;
}

function send(text) {
  current.messages.push({ role: "user", pieces: [[text, ""]] });
  saveChats(chats);
  showChat();
  return answer();
}

function regenerate() {
  if (running) return undefined;
  current.messages.pop();
  showChat();
  return answer();
}

function busy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  for (const id of ["chats", "new", "delete"]) $(id).disabled = isBusy;
}

// -- settings -----------------------------------------------------------------------------------

function openSettings() {
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  $("system").value = settings.system ?? "";
  $("colours").checked = settings.colours;
  $("key").value = key;
  $("settings").showModal();
}

function askForKey() {
  openSettings();
  $("key").focus();
}

function takeSettings() {
  for (const name of NUMBERS) settings[name] = $(name).value === "" ? null : $(name).valueAsNumber;
  settings.system = $("system").value.trim();
  settings.colours = $("colours").checked;
  key = $("key").value.trim();
  saveSettings(settings);
  saveKey(key);
  document.body.classList.toggle("colours", settings.colours);
  showModel();
}

async function showModel() {
  try {
    const { data } = await (await call("v1/models", key)).json();
    $("model").textContent = data[0].id;
    document.title = data[0].id;
    showSpeedUp(key);
  } catch (error) {
    $("model").textContent = error.status === 401 ? "an API key is needed" : error.message;
    if (error.status === 401) askForKey();
  }
}

// -- events -------------------------------------------------------------------------------------

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  send(text);
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
document.onkeydown = (event) => {
  if (event.key === "Escape") running?.abort();
};
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  chats = chats.filter((one) => one.messages.length);
  current = begin();
  showChat();
  $("text").focus();
};
$("delete").onclick = () => {
  chats = chats.filter((one) => one !== current);
  current = chats[0] ?? begin();
  saveChats(chats);
  showChat();
};
$("chats").onchange = () => {
  current = chats.find((one) => String(one.id) === $("chats").value) ?? current;
  showChat();
};
$("settings-open").onclick = openSettings;
$("settings").querySelector("form").onsubmit = takeSettings;
addEventListener("pagehide", () => saveChats(chats)); // an answer half written is kept too

Object.keys(SOURCES).forEach(nameInLegend);
document.body.classList.toggle("colours", settings.colours);
showChat();
showModel();
