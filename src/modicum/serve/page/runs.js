// Runs of a directory: curves that grow while a run trains, and samples of what its models say.

import { get } from "/page/api.js";
import { chart } from "/page/chart.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 2;

// Whether the server shows runs at all.
export async function hasRuns() {
  try {
    await get("/runs");
    return true;
  } catch {
    return false;
  }
}

export function startRuns() {
  let records = [], damaged = 0, cursor = "", shown = "", timer = null, samplesOf = "", saidOf = null;

  // A live run changes all the time: its state is said aloud only when the subject is another than before.
  function tell(state, subject) {
    $("run-state").textContent = state;
    if (subject !== saidOf) $("run-said").textContent = state;
    saidOf = subject;
  }

  function options(select, names) {
    const chosen = select.value;
    if (names.join("\n") === [...select.options].map((one) => one.value).join("\n")) return;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  async function refresh() {
    const { runs } = await get("/runs");
    options($("run"), runs.map((run) => run.name));
    const run = runs.find((one) => one.name === $("run").value);
    if (!run) {
      tell("There are no runs in this directory yet.", "");
      return;
    }
    options($("stage"), run.stages);
    const path = `/runs/${encodeURIComponent(run.name)}/${$("stage").value}`;
    if (path !== shown) [records, damaged, cursor, shown] = [[], 0, "", path];
    let changed = false, page;
    do {
      page = await get(`${path}?cursor=${encodeURIComponent(cursor)}`);
      if (path !== shown) return; // another was chosen meanwhile
      if (page.again) [records, damaged] = [[], 0];
      records.push(...page.records);
      damaged += page.damaged;
      changed ||= page.again || page.records.length > 0;
      cursor = page.cursor;
    } while (page.more);
    if (changed) draw();
    const last = records.at(-1);
    const checkpoints = run.checkpoints[$("stage").value].length;
    const live = Date.now() / 1000 - run.changed < 60 ? "live, " : "";
    const state = last ? `${live}update ${last.step}, ${checkpoints} checkpoints` : "no updates yet";
    tell(damaged ? `${state}; ${damaged} damaged lines of metrics.jsonl are left out` : state, path);
    await samples(run);
  }

  function draw() {
    const of = (kind, field) => records.filter((one) => one.kind === kind && Number.isFinite(one[field]))
      .map((one) => [one.step, one[field]]);
    $("charts").replaceChildren(
      chart("Loss, nats a token (line: training, dots: held out)", of("train", "loss"), of("heldout", "loss")),
      chart("Tokens a second", of("train", "tokens_per_second")),
      chart("Learning rate", of("train", "learning_rate")),
      chart("Gradient norm", of("train", "gradient_norm")),
    );
  }

  async function samples(run) {
    const wanted = run.has_samples ? `${run.name}@${run.changed}` : "";
    if (wanted === samplesOf) return;
    const found = run.has_samples ? (await get(`/runs/${encodeURIComponent(run.name)}/samples`)).samples : [];
    samplesOf = wanted;
    $("samples").replaceChildren(...found.map((sample) => {
      const made = document.createElement("article");
      for (const { role, content } of sample.messages ?? []) {
        made.appendChild(document.createElement("h3")).textContent = role;
        const said = made.appendChild(document.createElement("div"));
        said.className = "said";
        said.textContent = content;
      }
      return made;
    }));
  }

  async function turn() {
    try {
      await refresh();
    } catch (error) {
      tell(error.message, error.message);
    }
    if (timer !== null) timer = setTimeout(turn, SECONDS * 1000);
  }

  for (const id of ["run", "stage"]) $(id).addEventListener("change", () => refresh().catch(() => {}));
  return {
    show() { if (timer === null) { timer = 0; turn(); } },
    hide() { clearTimeout(timer); timer = null; },
  };
}
