// An answer token by token: coloured by how probable each was, with what else could have come.

const BOUNDS = [0.9, 0.7, 0.5, 0.3, 0.1];
const tip = document.getElementById("alternatives");

// The entries of one event, made small: [text, probability, [[text, probability], ...]]. `decoder` holds the bytes of
// a character that the next token ends.
export function compact(content, decoder) {
  return content.map((entry) => [
    decoder.decode(new Uint8Array(entry.bytes), { stream: true }),
    Math.exp(entry.logprob),
    entry.top_logprobs.map((top) => [top.token, Math.exp(top.logprob)]),
  ]);
}

// Add to `place` the tokens that it does not show yet. One of them is in the order of Tab; the arrow keys go from there to the others.
export function showTokens(place, tokens) {
  const shown = place.childElementCount;
  place.append(...tokens.slice(shown).map(([text, probability, tops], number) => {
    const span = document.createElement("span");
    const bin = BOUNDS.findIndex((bound) => probability >= bound);
    span.className = `token p${bin < 0 ? BOUNDS.length : bin}`;
    span.textContent = text;
    span.tabIndex = shown + number === 0 ? 0 : -1;
    span.setAttribute("aria-describedby", "alternatives");
    const show = () => showTip(span, text, probability, tops);
    span.addEventListener("mouseenter", show);
    span.addEventListener("focus", show);
    span.addEventListener("mouseleave", hideTip);
    span.addEventListener("blur", hideTip);
    return span;
  }));
}

export function moveByArrows(event) {
  const { target, key } = event;
  if (key === "Escape") hideTip();
  if (!target.classList?.contains("token")) return;
  const next = key === "ArrowRight" ? target.nextElementSibling
    : key === "ArrowLeft" ? target.previousElementSibling : null;
  if (!next) return;
  event.preventDefault();
  target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

const percent = (p) => `${(100 * p).toFixed(p < 0.001 ? 3 : 1)} %`;

function showTip(span, text, probability, tops) {
  const lines = tops.map(([other, p]) => `${percent(p).padStart(8)}  ${JSON.stringify(other)}`);
  tip.textContent = [`${JSON.stringify(text)}: ${percent(probability)}`, ...lines].join("\n");
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
  const below = box.bottom + 4 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? box.bottom + 4 : box.top - 4 - tip.offsetHeight}px`;
}

function hideTip() {
  tip.hidden = true;
}
