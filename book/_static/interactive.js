// Predictions, sliders and wide blocks of a page, without a kernel and without a network.
"use strict";

// --- predictions: the words of `compare` in ascend_lab/lab/checks/core.py -------------------------

const CLOSE = 0.05;

function inDigits(value, digits) {
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

// "1,045 cycles", "2.5x", "15 %" and "2,5" are numbers: 1045, 2.5, 15 and 2.5.
function numberIn(text) {
  const digits = text.trim().replace(/\s*[a-zA-Z%/µ]*$/, "");
  const plain = /^-?\d{1,3}(,\d{3})+(\.\d+)?$/.test(digits)
    ? digits.replaceAll(",", "")
    : digits.replace(",", ".");
  return /^-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/.test(plain) ? Number(plain) : NaN;
}

function verdict(guess, answer, said, unit) {
  if (!Number.isFinite(guess)) return "Write a number, such as 2.5.";
  const text = `You guessed ${inDigits(guess, 4)}${unit}; the model says ${said}: `;
  if (guess === answer || Math.abs(guess - answer) <= CLOSE * Math.abs(answer))
    return `${text}within 5%, well predicted.`;
  if (guess > 0 && answer > 0) {
    const factor = Math.max(guess / answer, answer / guess);
    const side = guess > answer ? "high" : "low";
    return `${text}your guess is too ${side} by a factor of ${inDigits(factor, 3)}.`;
  }
  const side = guess > answer ? "high" : "low";
  const off = `${inDigits(Math.abs(guess - answer), 4)}${unit}`;
  return `${text}your guess is too ${side} by ${off}.`;
}

function startGuess(form) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { answer, said, unit } = form.dataset;
    const guess = numberIn(form.querySelector("input").value);
    form.querySelector(".lab-verdict").textContent = verdict(guess, Number(answer), said, unit);
  });
}

// --- sliders --------------------------------------------------------------------------------------

async function unpacked(frames) {
  const bytes = Uint8Array.from(atob(frames), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

// Of the settings with the moved control's value, the one that changes fewest others.
function nearest(settings, wanted, moved) {
  const changes = (setting) => setting.filter((place, i) => place !== wanted[i]).length;
  return settings
    .filter((setting) => setting[moved] === wanted[moved])
    .reduce((best, setting) => (changes(setting) < changes(best) ? setting : best));
}

function placeOf(field) {
  return field.type === "checkbox" ? Number(field.checked) : Number(field.value);
}

function setPlace(field, place, value) {
  if (field.type === "checkbox") field.checked = place === 1;
  else field.value = place;
  if (field.type === "range") {
    field.setAttribute("aria-valuetext", value);
    field.parentElement.querySelector(".lab-value").textContent = value;
  }
}

function startExplorer(box) {
  const { controls, settings, frames } = JSON.parse(box.querySelector("script").textContent);
  const fields = [...box.querySelectorAll("input, select")];
  const image = box.querySelector("img");
  const caption = box.querySelector(".lab-caption");
  const snapped = box.querySelector(".lab-snapped");
  let drawn = null;
  let moves = 0;

  async function move(moved) {
    const wanted = fields.map(placeOf);
    const setting = nearest(settings, wanted, moved);
    const back = controls.filter((_, i) => setting[i] !== wanted[i]);
    fields.forEach((field, i) => setPlace(field, setting[i], controls[i].values[setting[i]]));
    snapped.textContent = back.length
      ? `Not drawn together on this page; set back: ${back.map((c) => c.label).join(", ")}.`
      : "";
    moves += 1;
    const move = moves;
    drawn ??= unpacked(frames);
    const { pieces, pictures, captions } = await drawn;
    if (move !== moves) return; // a later move came while the frames were unpacked
    const place = settings.indexOf(setting);
    const picture = pictures[place].map((piece) => pieces[piece]).join("");
    // A refused setting leaves the picture of the setting before it, and says why.
    box.classList.toggle("lab-refused", !picture);
    if (picture) image.src = `data:image/svg+xml,${encodeURIComponent(picture)}`;
    caption.textContent = captions[place];
  }

  fields.forEach((field, i) => field.addEventListener("input", () => move(i)));
  box.querySelector("fieldset").disabled = false;
}

// --- what scrolls -----------------------------------------------------------------------------------

// A block wider than the page scrolls by the arrow keys too, once the Tab key can reach it.
function reachScrollers(article) {
  for (const block of article.querySelectorAll("pre, table, .lab-road")) {
    if (block.scrollWidth > block.clientWidth + 1) block.tabIndex = 0;
    else block.removeAttribute("tabindex");
  }
}

function start() {
  const article = document.querySelector("article");
  // Its size changes with the window, and when a fold opens.
  if (article) new ResizeObserver(() => reachScrollers(article)).observe(article);
  document.querySelectorAll(".lab-guess").forEach(startGuess);
  document.querySelectorAll(".lab-explore").forEach(startExplorer);
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
