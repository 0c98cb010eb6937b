// The page: which view is shown, dark or light, the key, and the model that answers.

import { get, useKey } from "/page/api.js";
import { startChat } from "/page/chat.js";
import { hasRuns, startRuns } from "/page/runs.js";

const $ = (id) => document.getElementById(id);
let model = "";

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}

function view(name) {
  for (const one of ["chat", "runs"]) {
    $(one).hidden = one !== name;
    $(`show-${one}`).setAttribute("aria-pressed", String(one === name));
  }
  if (name === "runs") runs.show();
  else runs.hide();
}

function askForKey() {
  $("key").hidden = false;
  if ($("key-dialog").open) return;
  $("key-dialog").returnValue = "";
  $("key-dialog").showModal();
}

async function connect() {
  try {
    const found = (await get("/v1/models")).data[0];
    model = found.id;
    $("model").textContent = `${found.id}, ${found.context.toLocaleString("en")} tokens of context`;
    $("show-runs").hidden = !(await hasRuns());
  } catch (error) {
    if ($("model").textContent !== error.message) $("model").textContent = error.message; // what changes is read aloud
    if (error.status === 401) askForKey();
    else setTimeout(connect, 1500);
  }
}

theme(localStorage.getItem("modicum-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  localStorage.setItem("modicum-theme", document.documentElement.dataset.theme);
});
$("key").addEventListener("click", askForKey);
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "ok") return; // put away with Escape: the key stays what it was
  useKey($("key-value").value);
  connect();
});
const runs = startRuns();
$("show-chat").addEventListener("click", () => view("chat"));
$("show-runs").addEventListener("click", () => view("runs"));
startChat(() => model, askForKey);
connect();
