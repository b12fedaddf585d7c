// Conversations and settings, kept in the browser and nowhere else. Every conversation has an entry
// of its own, so that tabs do not overwrite each other's.

const CHAT = "gguf-mtp.chat.";
const ALL_CHATS = "gguf-mtp.chats"; // where they were kept together
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

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(CHAT));
  } catch {
    return []; // blocked
  }
}

const isChat = (chat) => Array.isArray(chat?.messages);

/** A name that no other tab has given either. */
export const newId = () => `${Date.now()}-${Math.random().toString(36).slice(2)}`;

/** Newest first. A chat is {id, saved, messages}, a message {role, pieces, reasoning, note} with
 * pieces [text, source]; an answer's earlier versions are {pieces, reasoning, note} in `versions`,
 * and what the server did not take is marked `refused`, what no longer fits `forgotten`. */
export function loadChats() {
  const together = read(localStorage, ALL_CHATS, null);
  if (Array.isArray(together)) {
    together.filter(isChat).forEach((chat, i) => saveChat(chat, Date.now() - i));
    localStorage.removeItem(ALL_CHATS);
  }
  const chats = names().map((name) => read(localStorage, name, null)).filter(isChat);
  return chats.sort((a, b) => (b.saved ?? 0) - (a.saved ?? 0));
}

/** Where there is no room, the oldest other conversation is forgotten. */
export function saveChat(chat, saved = Date.now()) {
  if (!chat.messages.length) return;
  chat.saved = saved;
  while (!write(localStorage, CHAT + chat.id, chat)) {
    const others = loadChats().filter((one) => one.id !== chat.id);
    if (!others.length) return;
    deleteChat(others.at(-1));
  }
}

export function deleteChat(chat) {
  try {
    localStorage.removeItem(CHAT + chat.id);
  } catch {
    // blocked: it was never kept
  }
}

/** Calls `changed` when another tab saved or deleted a conversation. */
export function onOtherTabs(changed) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(CHAT)) changed();
  });
}

export const loadSettings = () => read(localStorage, SETTINGS, {});
export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);
export const loadKey = () => read(sessionStorage, KEY, "");
export const saveKey = (key) => write(sessionStorage, KEY, key);
