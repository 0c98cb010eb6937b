// The chat: questions, answers as they come, stop and retry. Whatever a model says is text, never HTML.

import { ApiError, ask } from "/page/api.js";
import { Conversations } from "/page/conversations.js";
import { compact, moveByArrows, showTokens } from "/page/tokens.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "min_p", "max_tokens", "seed"];
const SETTINGS = "modicum-settings";

export function startChat(model, askForKey) {
  const conversations = new Conversations(fail);
  let running = null; // the AbortController of the answer under way

  function article(message) {
    const made = document.createElement("article");
    made.className = message.role;
    const [who, said, how] = ["h3", "div", "p"].map((tag) => made.appendChild(document.createElement(tag)));
    who.textContent = message.role === "user" ? "You" : "Model";
    said.className = "said";
    how.className = "how";
    fill(made, message);
    return made;
  }

  function fill(made, message) {
    const [, said, how] = made.children;
    if (message.tokens?.length) showTokens(said, message.tokens);
    else said.textContent = message.content;
    how.textContent = message.how ?? "";
    how.hidden = !message.how;
  }

  // All of the open conversation, for when it has become another one. A turn is appended instead: a screen reader says
  // whatever is put into the log.
  function show() {
    $("log").replaceChildren();
    append(...conversations.current.messages);
    list();
    buttons();
  }

  function append(...messages) {
    $("log").append(...messages.map(article));
    $("log").scrollTop = $("log").scrollHeight;
    return $("log").lastElementChild;
  }

  // Who is in the list with the keyboard stays there.
  function list() {
    const held = $("conversations").contains(document.activeElement) ? document.activeElement.id : "";
    $("conversations").replaceChildren(...conversations.all.map(entry));
    if (held) ($(held) ?? $("new")).focus();
  }

  function entry(one) {
    const item = document.createElement("li");
    const open = item.appendChild(document.createElement("button"));
    open.type = "button";
    open.id = `open-${one.id}`;
    open.textContent = one.title;
    open.setAttribute("aria-pressed", String(one === conversations.current));
    open.addEventListener("click", () => {
      if (one.id === conversations.current.id) return;
      running?.abort();
      fail("");
      conversations.open(one.id);
      show();
    });
    const remove = item.appendChild(document.createElement("button"));
    remove.type = "button";
    remove.id = `remove-${one.id}`;
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Delete ${one.title}`);
    remove.addEventListener("click", () => {
      const shown = one.id === conversations.current.id;
      if (shown) running?.abort();
      conversations.remove(one.id);
      if (shown) show();
      else list();
    });
    return item;
  }

  // A button that goes out hands the keyboard to the messages.
  function buttons() {
    const held = document.activeElement;
    $("send").disabled = Boolean(running);
    $("stop").disabled = !running;
    $("retry").disabled = Boolean(running) || !conversations.current.messages.length;
    if (held.disabled) $("log").focus();
  }

  // Troubles of one turn stand beside each other; "" puts them away.
  function fail(message) {
    $("error").textContent = message && `${$("error").textContent} ${message}`.trim();
    $("error").hidden = !message;
  }

  function request(messages) {
    const numbers = NUMBERS.filter((id) => $(id).value !== "").map((id) => [id, Number($(id).value)]);
    const system = $("system").value.trim();
    const said = messages.map(({ role, content }) => ({ role, content }));
    return {
      model: model(),
      messages: system ? [{ role: "system", content: system }, ...said] : said,
      ...Object.fromEntries(numbers),
      ...($("probabilities").checked ? { logprobs: true, top_logprobs: 5 } : {}),
    };
  }

  async function answer() {
    const conversation = conversations.current;
    const message = { role: "assistant", content: "", how: "", tokens: [] };
    const log = $("log");
    const decoder = new TextDecoder();
    const begun = performance.now();
    const asked = request(conversation.messages);
    const control = (running = new AbortController());
    log.setAttribute("aria-busy", "true");
    const made = append(message);
    buttons();
    let reason = "";
    try {
      for await (const { choices, usage } of ask(asked, control.signal)) {
        const [choice] = choices;
        message.content += choice?.delta.content ?? "";
        if (choice?.logprobs) message.tokens.push(...compact(choice.logprobs.content, decoder));
        reason = choice?.finish_reason ?? reason;
        if (usage) message.how = figures(usage, reason, performance.now() - begun);
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
        fill(made, message);
        if (atEnd) log.scrollTop = log.scrollHeight;
      }
    } catch (error) {
      if (error.name === "AbortError") message.how = "stopped";
      else {
        if (message.content) message.how = "broken off";
        fail(error.message);
      }
      if (error.status === 401) askForKey();
      if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
    } finally {
      running = null;
      const said = Boolean(message.content || message.how);
      if (said) {
        fill(made, message);
        conversation.messages.push(message);
      } else made.remove();
      log.removeAttribute("aria-busy");
      buttons();
      if (said) conversations.save(conversation);
      list();
    }
  }

  function send(event) {
    event.preventDefault();
    const content = $("question").value.trim();
    if (!content || running) return;
    $("question").value = "";
    fail("");
    append(conversations.add({ role: "user", content }));
    list();
    answer();
  }

  function retry() {
    fail("");
    const { messages } = conversations.current;
    if (messages.at(-1)?.role === "assistant") {
      messages.pop();
      $("log").lastElementChild.remove();
    }
    answer();
  }

  keepSettings();
  $("ask").addEventListener("submit", send);
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("retry").addEventListener("click", retry);
  $("new").addEventListener("click", () => {
    running?.abort();
    fail("");
    conversations.begin();
    show();
    $("question").focus();
  });
  document.addEventListener("keydown", moveByArrows);
  addEventListener("storage", () => {
    if (conversations.refresh(Boolean(running))) show();
    else list();
  });
  show();
}

function figures(usage, reason, milliseconds) {
  const tokens = usage.completion_tokens;
  const speed = (tokens / (milliseconds / 1000)).toFixed(1);
  return `${tokens} tokens, ${speed} a second${reason === "length" ? ", cut at the limit" : ""}`;
}

function keepSettings() {
  const ids = [...NUMBERS, "system"];
  const kept = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  for (const id of ids) if (typeof kept[id] === "string") $(id).value = kept[id];
  $("probabilities").checked = kept.probabilities === true;
  $("settings").addEventListener("change", () => {
    const values = Object.fromEntries(ids.map((id) => [id, $(id).value]));
    localStorage.setItem(SETTINGS, JSON.stringify({ ...values, probabilities: $("probabilities").checked }));
  });
}
