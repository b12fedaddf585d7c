// Conversations and settings, kept in the browser and nowhere else.

const CHATS = "gguf-mtp.chats";
const SETTINGS = "gguf-mtp.settings";
const KEY = "gguf-mtp.key";

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // blocked, or not ours
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or blocked
  }
}

/** A chat is {id, messages}, a message {role, pieces, reasoning, note}; pieces are [text, source]. */
export function loadChats() {
  const chats = read(localStorage, CHATS, []);
  return Array.isArray(chats) ? chats.filter((chat) => Array.isArray(chat?.messages)) : [];
}

/** Newest first; where there is no room for all, the oldest are forgotten. */
export function saveChats(chats) {
  const kept = chats.filter((chat) => chat.messages.length);
  while (!write(localStorage, CHATS, kept) && kept.length > 1) kept.pop();
}

export const loadSettings = () => read(localStorage, SETTINGS, {});
export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);
export const loadKey = () => read(sessionStorage, KEY, "");
export const saveKey = (key) => write(sessionStorage, KEY, key);
