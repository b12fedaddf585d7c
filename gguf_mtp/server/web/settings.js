// The settings: their dialog, and what of them goes into a request.

import { loadKey, loadSettings, saveKey, saveSettings } from "./store.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "draft_max"];

export const settings = { colours: false, ...loadSettings(), key: loadKey() };

function colour() {
  document.body.classList.toggle("colours", settings.colours);
}

export function openSettings(note = "") {
  for (const name of NUMBERS) $(name).value = settings[name] ?? "";
  $("system").value = settings.system ?? "";
  $("colours").checked = settings.colours;
  $("key").value = settings.key;
  $("key-note").textContent = note;
  $("key-note").hidden = !note;
  if (!$("settings").open) $("settings").showModal();
}

/** After a 401: the server's own words where a key was sent, and a wrong one only then. */
export function askForKey() {
  openSettings(settings.key ? "The server does not accept this API key." : "The server needs an API key.");
  $("key").select();
}

function take() {
  for (const name of NUMBERS) settings[name] = $(name).value === "" ? null : $(name).valueAsNumber;
  settings.system = $("system").value.trim();
  settings.colours = $("colours").checked;
  settings.key = $("key").value.trim();
  const { key, ...kept } = settings;
  saveSettings(kept);
  saveKey(key);
  colour();
}

/** Calls `taken` when the reader has changed them. */
export function startSettings(taken) {
  $("settings-open").onclick = () => openSettings();
  $("settings").querySelector("form").onsubmit = () => {
    take();
    taken();
  };
  colour();
}

/** The fields of a request; empty ones are left to the server. */
export function fields() {
  return Object.fromEntries(
    NUMBERS.filter((name) => Number.isFinite(settings[name])).map((name) => [name, settings[name]]),
  );
}
