// The server, as the page uses it: JSON in and out, and answers as they come.

let key = sessionStorage.getItem("modicum-key") ?? "";

export function useKey(value) {
  key = value.trim();
  sessionStorage.setItem("modicum-key", key);
}

// What went wrong, in the server's words. status 0: it was not reached.
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers() {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function reach(path, options) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

export async function get(path) {
  return (await reach(path)).json();
}

// Each event of a streamed answer, as an object. Throws ApiError also for an error inside the stream.
export async function* ask(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await reach("/v1/chat/completions", { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const events = (held + (await more(reader))).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const object = JSON.parse(data);
      if (object.error) throw new ApiError(object.error.message, 200);
      yield object;
    }
  }
}

// The next piece of an answer, which ends with its own last event and never with its connection.
async function more(reader) {
  const { value, done } = await reader.read().catch((error) => {
    if (error.name === "AbortError") throw error;
    return { done: true };
  });
  if (done) throw new ApiError("The answer broke off.", 0);
  return value;
}
