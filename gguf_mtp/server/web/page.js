// The page: which conversation is shown, what is asked, and what happens at a click.

import { Shown, beginVersion, button, element, endVersion, textOf, turnTo } from "./messages.js";
import { askForKey, fields, settings, startSettings } from "./settings.js";
import { deleteChat, loadChats, newId, onOtherTabs, saveChat } from "./store.js";
import { Refusal, call, chat } from "./stream.js";
import { Meter, showSpeedUp } from "./strip.js";

const $ = (id) => document.getElementById(id);

let chats = loadChats();
let current = chats[0] ?? begin();
let running = null; // the AbortController of the answer that is being written
let nContext = 0; // tokens; 0: not known yet

function begin() {
  const made = { id: newId(), messages: [] };
  chats.unshift(made);
  return made;
}

// -- showing ------------------------------------------------------------------------------------

function show(message) {
  const shown = new Shown(message);
  $("log").append(shown.article);
  return shown;
}

function showChat() {
  $("log").replaceChildren();
  const all = current.messages.map(show);
  const last = all.at(-1);
  if (last?.message.role === "assistant") addActions(last);
  $("log").scrollTop = $("log").scrollHeight;
  showList();
}

/** Newest first; one that has not been saved yet is new. */
function showList() {
  chats.sort((a, b) => (b.saved ?? Infinity) - (a.saved ?? Infinity));
  const options = chats.map((one) => {
    const option = element("option", "", one.messages[0] ? textOf(one.messages[0]) : "New conversation");
    option.value = one.id;
    option.selected = one === current;
    return option;
  });
  $("chats").replaceChildren(...options);
}

/** Below the last answer: write it again, copy it, look at its other versions. */
function addActions(shown) {
  document.querySelectorAll(".actions").forEach((old) => old.remove());
  const { message } = shown;
  const actions = element("div", "actions");
  actions.append(
    button("again", "Regenerate", regenerate),
    button("copy", "Copy", () => navigator.clipboard?.writeText(textOf(message))),
  );
  const n = message.versions?.length ?? 0;
  if (n > 1) {
    const turn = (by) => () => {
      turnTo(message, message.at + by);
      saveChat(current);
      shown.draw();
      addActions(shown);
    };
    const [back, on] = [button("back", "‹", turn(-1)), button("on", "›", turn(1))];
    back.ariaLabel = "earlier version";
    on.ariaLabel = "later version";
    back.disabled = message.at === 0;
    on.disabled = message.at === n - 1;
    actions.append(back, element("span", "version", `${message.at + 1} of ${n}`), on);
  }
  shown.article.append(actions);
}

/** Scrolls along unless the reader has scrolled up. */
function following(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// -- asking -------------------------------------------------------------------------------------

const isSent = (message) => !message.refused && !message.forgotten;

function request() {
  const messages = current.messages
    .filter((message) => isSent(message) && (message.role === "user" || textOf(message)))
    .map((message) => ({ role: message.role, content: textOf(message) }));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  return { messages, ...fields() };
}

/** Leaves the oldest question that is still sent, and its answer, out of what is sent from now on;
 * false where there is only one. */
function forgetOldest(messages) {
  const questions = messages.filter((message) => isSent(message) && message.role === "user");
  if (questions.length < 2) return false;
  const next = messages.indexOf(questions[1]);
  for (const message of messages.slice(0, next).filter(isSent)) message.forgotten = true;
  return true;
}

/** The answer's events; where the context is full, the oldest exchanges are left out. */
async function* answerOf(asked, signal, body) {
  for (;;) {
    try {
      yield* chat(body, settings.key, signal);
      return;
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !forgetOldest(asked.messages)) throw error;
      body = request();
    }
  }
}

/** Writes the last message of the conversation. */
async function answer(message) {
  const asked = current;
  const body = request();
  const shown = new Shown(message);
  const before = [...$("log").children][asked.messages.indexOf(message)];
  if (before) before.replaceWith(shown.article);
  else $("log").append(shown.article);
  shown.article.classList.add("writing");
  running = new AbortController();
  busy(true);
  const meter = new Meter();
  const timer = setInterval(() => showSpeedUp(settings.key), 1000);
  try {
    for await (const event of answerOf(asked, running.signal, body)) {
      const choice = event.choices[0];
      if (choice) following(() => shown.add(choice));
      if (choice) meter.add(choice);
      if (event.timings) meter.end(event.timings, nContext);
      if (choice?.finish_reason === "length") message.isCut = true;
    }
    if (message.isCut) message.note = cutNote(meter);
  } catch (error) {
    message.note = noteOf(error);
    if (error instanceof Refusal && error.status >= 400 && error.status < 500) refuse(asked, message);
  } finally {
    delete message.isCut;
    clearInterval(timer);
    running = null;
    busy(false);
    endVersion(message);
    saveChat(asked);
    if (asked === current) showChat();
    showSpeedUp(settings.key);
  }
}

function cutNote(meter) {
  if (meter.isFull(nContext)) return "cut off: the context is full";
  return settings.max_tokens
    ? `cut off after ${settings.max_tokens} tokens, the most that the settings allow`
    : "cut off after as many tokens as the server allows";
}

/** What the server did not take is not sent again; its text can be changed and sent anew. */
function refuse(asked, message) {
  if (message.versions?.length) return; // the question was taken before
  const question = asked.messages.at(-2);
  message.refused = true;
  if (question?.role !== "user") return;
  question.refused = true;
  if (!$("text").value) $("text").value = textOf(question);
}

function noteOf(error) {
  if (error.name === "AbortError") return "stopped";
  if (error instanceof Refusal && error.status === 401) askForKey();
  return error.message;
}

function send(text) {
  current.messages = current.messages.filter((message) => !message.refused);
  current.messages.push({ role: "user", pieces: [[text, ""]] });
  const message = { role: "assistant", pieces: [], reasoning: "" };
  saveChat(current);
  showChat();
  current.messages.push(message);
  return answer(message);
}

function regenerate() {
  if (running) return undefined;
  const message = current.messages.at(-1);
  const question = current.messages.at(-2);
  delete message.refused;
  if (question) delete question.refused;
  beginVersion(message);
  return answer(message);
}

function busy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  for (const id of ["chats", "new", "delete"]) $(id).disabled = isBusy;
}

async function showModel() {
  try {
    const { data } = await (await call("v1/models", settings.key)).json();
    $("model").textContent = data[0].id;
    document.title = data[0].id;
    nContext = data[0].max_model_len ?? 0;
    showSpeedUp(settings.key);
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
  if (current.messages.length && !confirm("Delete this conversation?")) return;
  deleteChat(current);
  chats = chats.filter((one) => one !== current);
  current = chats[0] ?? begin();
  showChat();
};
$("chats").onchange = () => {
  current = chats.find((one) => String(one.id) === $("chats").value) ?? current;
  showChat();
};
onOtherTabs(() => {
  const known = loadChats();
  const same = known.find((one) => one.id === current.id);
  const isMine = running || !current.messages.length || !same;
  chats = known.filter((one) => one.id !== current.id);
  if (!isMine) current = same;
  chats.push(current);
  if (isMine) showList();
  else showChat();
});
addEventListener("pagehide", () => {
  if (running) saveChat(current); // an answer half written is kept too
});

startSettings(showModel);
showChat();
showModel();
