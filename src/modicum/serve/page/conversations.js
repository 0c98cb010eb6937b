// Conversations kept in this browser: [{ id, title, messages: [{ role, content, how, tokens }] }], newest first.

const PLACE = "modicum-conversations";
const MOST = 50;

export class Conversations {
  constructor() {
    this.all = read();
    this.current = this.all[0] ?? null;
    if (!this.current) this.begin();
  }

  begin() {
    if (!this.current || this.current.messages.length) {
      this.current = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "New conversation", messages: [] };
      this.all.unshift(this.current);
      this.all.length = Math.min(this.all.length, MOST);
    }
    this.save();
  }

  open(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    if (this.current.id === id) {
      this.current = this.all[0] ?? null;
      if (!this.current) this.begin();
    }
    this.save();
  }

  add(message) {
    const { messages } = this.current;
    messages.push(message);
    if (messages.length === 1) this.current.title = message.content.slice(0, 60);
    this.save();
    return message;
  }

  // Probabilities are large: they are kept for the conversation that is open, and let go first when there is no room.
  save() {
    const light = (one) => ({ ...one, messages: one.messages.map(({ tokens, ...rest }) => rest) });
    const kept = this.all.map((one) => (one === this.current ? one : light(one)));
    for (const value of [kept, kept.map(light), kept.map(light).slice(0, 5)]) {
      try {
        localStorage.setItem(PLACE, JSON.stringify(value));
        return;
      } catch (error) {
        if (error.name !== "QuotaExceededError") throw error;
      }
    }
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
