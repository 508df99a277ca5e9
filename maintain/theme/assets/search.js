// The search of the site: MiniSearch ranks the sections by the words of a question, of which each
// may be missing. The sections are a script, so that all of this also works from a folder.
const BASE = new URL("..", document.currentScript.src);
const STOP_WORDS = new Set(`a about after all am an and any are as at be been before being but by can could
  did do does doing don for from get go got had happens has have he her here his how i if in into is it its
  just know make me mean means mine much my need needs not of on one or our please should see show so some tell than that the their them then
  there these they thing this those to too up us use used uses using very want was we well were what when
  where which who why will with work works would you your`.split(/\s+/));
// The words of our pages, and what a beginner calls the same
const SAME = Object.entries({
  cost: "price money dollars cheap expensive", cpu: "laptop", curves: "plot graph chart", died: "crash crashed crashes dies",
  gpu: "card cards vram", hangs: "stuck freezes frozen", "held-out": "accuracy validate validation", large: "big bigger",
  macbook: "mac apple", memory: "ram vram", mfu: "utilization", node: "machine machines computer computers", path: "order",
  pip: "install installing", publish: "upload share", resume: "pause paused stop stopped continue restart interrupted lost",
  rubbish: "garbage gibberish nonsense", reads: "format csv", several: "multiple many", short: "easiest simplest beginner",
  speed: "slow slower fast faster", spikes: "jumps explodes", vllm: "deploy serve", "w&b": "biases wandb",
}).map(([word, others]) => [word, new Set(others.split(" "))]);
const stem = (word) => (word.length < 4 ? word
  : word.replace(/(?:ing|ed|es|s|e)$/, "").replace(/([^aeiouls])\1$/, "$1"));

function words(text) {
  const found = text.match(/[\p{L}\p{N}]+(?:[._-][\p{L}\p{N}]+)*/gu) || [];
  return found.flatMap((word) => (/[._-]/.test(word) ? [word, ...word.split(/[._-]/)] : [word]));
}

function term(word) {
  const lower = word.toLowerCase();
  return STOP_WORDS.has(lower) ? null : stem(lower);
}

// Pages that answer questions come first, what was measured and exercises last.
const WEIGHTS = [[/exercises|^(benchmarks|CONTRIBUTING|learn)/, 0.4],
  [/^docs.(questions|troubleshooting|glossary|which)|^index/, 1.6], [/^(docs|0)/, 1.2], [/./, 0.7]];
const weight = (place) => WEIGHTS.find(([pattern]) => pattern.test(place))[1];

let index;
function find(question) {
  if (!index) {
    index = new MiniSearch({ fields: ["title", "page", "text"], storeFields: ["place", "title", "page", "text"],
      tokenize: words, processTerm: term });
    index.addAll(SECTIONS.map((section, id) => ({ id, ...section })));
  }
  const asked = words(question.toLowerCase());
  const also = SAME.filter(([, others]) => asked.some((word) => others.has(word))).map(([word]) => word);
  const results = index.search([question, ...also].join(" "), {
    boost: { title: 3, page: 0.5 },
    boostDocument: (_id, _term, { place }) => weight(place),
    prefix: (word) => word.length > 3,
    fuzzy: (word) => (word.length > 6 ? 0.2 : 0),
    weights: { prefix: 0.3, fuzzy: 0.2 },
  });
  const places = new Set(); // the rows of a table have the same one
  return results.filter(({ place }) => !places.has(place) && places.add(place)).slice(0, 10);
}

// -- The page ---------------------------------------------------------------------------------------

const dialog = document.querySelector("dialog.find"), toggle = document.querySelector("#__search");
const [field, status, list] = ["input", "p", "ol"].map((name) => dialog.querySelector(name));

// The text from shortly before the first word that was found, with such words in bold
function excerpt(text, terms) {
  const pieces = text.split(/([\p{L}\p{N}_-]+)/u);
  const isFound = (word) => terms.includes(term(word));
  const first = Math.max(0, pieces.findIndex(isFound) - 16);
  return pieces.slice(first, first + 70).map((piece) => {
    if (!isFound(piece)) return piece;
    const mark = document.createElement("mark");
    mark.textContent = piece;
    return mark;
  });
}

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

function answer() {
  const results = field.value.trim() ? find(field.value) : [];
  status.textContent = !field.value.trim() ? "" : results.length ? "Enter opens the first result." : "Nothing found.";
  list.replaceChildren(...results.map(({ place, title, page, text, terms }) => {
    const link = element("a", element("b", title), element("small", page), ...excerpt(text, terms));
    link.href = new URL(place, BASE);
    return element("li", link);
  }));
}

function open() {
  if (dialog.open) return;
  dialog.showModal();
  field.select();
  if (typeof SECTIONS !== "undefined") return;
  const script = document.createElement("script");
  script.src = new URL("assets/sections.js", BASE);
  script.onload = answer;
  document.head.append(script);
}

document.querySelector("div.find button").onclick = open;
toggle.onchange = () => { toggle.checked = false; open(); }; // the sign on a narrow screen
addEventListener("keydown", (event) => {
  if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  open();
});
field.oninput = () => { if (typeof SECTIONS !== "undefined") answer(); };
dialog.onclick = (event) => { if (event.target === dialog || event.target.closest("a")) dialog.close(); };
dialog.onkeydown = (event) => {
  event.stopPropagation(); // other keys are commands of the page, such as n for the next one
  const links = [...list.querySelectorAll("a")], here = links.indexOf(document.activeElement);
  const next = { ArrowDown: links[here + 1], ArrowUp: links[here - 1] || field }[event.key];
  if (event.key === "Enter" && here < 0) links[0]?.click();
  else if (next) next.focus();
  else return;
  event.preventDefault();
};
