// Conversations kept in this browser: [{ id, title, messages: [{ role, content, how, tokens }] }], newest first. Other
// tabs keep theirs in the same place: a save reads it again and changes one conversation.

const PLACE = "modicum-conversations";
const MOST = 50;

export class Conversations {
  // `tell` is called with a line for the user when something is not kept.
  constructor(tell) {
    this.tell = tell;
    this.all = read();
    this.current = this.all[0] ?? null;
    if (!this.current) this.begin();
  }

  begin() {
    if (this.current && !this.current.messages.length) return;
    this.current = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "New conversation", messages: [] };
    this.save();
  }

  open(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
  }

  remove(id) {
    write(read().filter((one) => one.id !== id));
    if (this.current.id === id) this.current = read()[0] ?? null;
    if (this.current) this.gather(this.current);
    else this.begin();
  }

  add(message) {
    const { messages } = this.current;
    messages.push(message);
    if (messages.length === 1) this.current.title = message.content.slice(0, 60);
    this.save();
    return message;
  }

  // Another tab wrote. True where it went on with the open conversation; that one stays ours if `busy`.
  refresh(busy) {
    const there = read().find((one) => one.id === this.current.id);
    const changed = Boolean(there) && !busy && JSON.stringify(light(there)) !== JSON.stringify(light(this.current));
    if (changed) this.current = there;
    this.gather(this.current);
    return changed;
  }

  // Probabilities are large: they are kept for the conversation that is open, and let go first when there is no room.
  save(one = this.current) {
    this.gather(one);
    let list = this.newest(MOST);
    let kept = write(list.map((one) => (one === this.current ? one : light(one))));
    for (let most = list.length; !kept && most > 0; most--) {
      list = this.newest(most);
      kept = write(list.map(light));
    }
    if (!kept) {
      this.tell("This browser has no room to keep the conversation.");
      return;
    }
    const dropped = this.all.filter((one) => !list.includes(one)).map((one) => one.title);
    if (dropped.length) this.tell(`Dropped to make room: ${dropped.join(", ")}.`);
    this.all = list;
  }

  // What is kept by now, with `one` and the open conversation as they stand here. One that is gone was deleted: only
  // the open one is put back.
  gather(one) {
    this.all = read();
    for (const ours of [one, this.current]) {
      const at = this.all.findIndex(({ id }) => id === ours.id);
      if (at >= 0) this.all[at] = ours;
      else if (ours === this.current) this.all.unshift(ours);
    }
  }

  // The open conversation and as many of the others as make `most`.
  newest(most) {
    const others = this.all.filter((one) => one !== this.current).slice(0, most - 1);
    return this.all.filter((one) => one === this.current || others.includes(one));
  }
}

function light(conversation) {
  return { ...conversation, messages: conversation.messages.map(({ tokens, ...rest }) => rest) };
}

// Whether there was room.
function write(list) {
  try {
    localStorage.setItem(PLACE, JSON.stringify(list));
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

function read() {
  try {
    const found = JSON.parse(localStorage.getItem(PLACE) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => Array.isArray(one?.messages)) : [];
  } catch {
    return []; // what another program wrote there is no conversation
  }
}
