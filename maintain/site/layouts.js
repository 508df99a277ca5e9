// The page looks up stored answers of estimate-scaling.py. It computes only steps, hours and prices.
const grid = JSON.parse(document.getElementById("grid").textContent);
const { axes, parameters, rates, refused, strings, layouts, problems, reasons, cells } = grid;
const $ = (id) => document.getElementById(id);
const CHOICES = ["model", "gpu", "devices", "link", "length", "batch"];
const NUMBERS = { tokens: "100", price: "" };
const DEFAULTS = { model: "meta-llama/Llama-3.1-8B", gpu: "H100", devices: "64", link: "400", length: "8192", batch: "4194304" };
const perNode = axes["devices per node"];
let shown = false; // the answer
let guess = null; // [chapter, GB], each may be ""

// -- Elements and numbers ---------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

const number = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
// A few digits for what has no more
const rounded = (value) => number(value, value >= 100 ? 0 : value >= 1 ? 1 : 2);
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const fill = (template, values) =>
  template.replace(/\{(\w+)\}/g, (_, name) => values[name]).split(/\s+/).filter(Boolean).join(" ");

function options(select, rows) {
  for (const [value, text] of rows) select.append(element("option", { value, textContent: text }));
}

// -- The stored answers -----------------------------------------------------------------------------

const shortName = (gpu) => gpu.split(",")[0];
const flagsOf = (gpu) => Object.entries(axes.gpus).find(([name]) => shortName(name) === gpu)[1];

function links(devices) {
  return devices > perNode ? axes.links : axes.links.slice(-1);
}

// The answer for a choice: the sentence that refuses it, or the best layouts and why others do not fit.
function lookUp(choice) {
  const sentence = refused[`${choice.model} ${choice.length}`];
  if (sentence) return { sentence };
  const key = [choice.model, choice.length, choice.batch, choice.gpu, choice.devices].join(" ");
  const found = links(choice.devices);
  const place = found.length > 1 ? found.indexOf(Number(choice.link)) : 0;
  const [traced, more, list, ...numbers] = cells[key][place];
  const best = [];
  for (let i = 0; i < numbers.length; i += 4) {
    const [name, chapter, samples, microBatches, checkpointing, gb, parts, tracedGb, command] = layouts[numbers[i]];
    const [step, efficiency, bubble] = numbers.slice(i + 1, i + 4);
    best.push({ name: strings[name], chapter, samples, microBatches, checkpointing, gb, parts, tracedGb,
      command: strings[command], step, efficiency, bubble });
  }
  const out = [];
  for (let i = 0; i < reasons[list].length; i += 2) {
    const [name, chapter] = problems[reasons[list][i]];
    out.push({ name, chapter, problem: problems[reasons[list][i + 1]] });
  }
  return { traced: Boolean(traced), more, best, out };
}

function toolCommand(choice, traced) {
  const link = choice.devices > perNode ? `--link ${choice.link}` : "";
  return fill(axes.command, { ...choice, link, samples: choice.batch / choice.length,
    gpu: flagsOf(choice.gpu), trace: traced ? "" : "--no-trace" });
}

function chapterCommand(choice, layout) {
  const batch = `-b ${layout.samples} --gradient-accumulation-steps ${layout.microBatches}`;
  return fill(layout.command, { flags: `-m ${choice.model} -s ${choice.length} ${batch}`,
    nodes: choice.devices / perNode, ranks: Math.min(perNode, choice.devices) });
}

// -- What is chosen ---------------------------------------------------------------------------------

function chosen() {
  const choice = Object.fromEntries(CHOICES.map((name) => [name, $(name).value]));
  for (const name of ["devices", "link", "length", "batch"]) choice[name] = Number(choice[name]);
  return choice;
}

function address() {
  const state = new URLSearchParams();
  for (const name of [...CHOICES, ...Object.keys(NUMBERS)])
    if ($(name).value !== "") state.set(name, $(name).value);
  return `#${state.toString().replaceAll("%2F", "/")}`;
}

// Takes the choices of the address. Returns whether it has any, and a sentence about unknown ones.
function readAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  const unknown = [];
  let any = false;
  for (const name of [...CHOICES, ...Object.keys(NUMBERS)]) {
    if (!state.has(name)) continue;
    const value = state.get(name), field = $(name);
    const isKnown = name in NUMBERS ? value !== "" && Number(value) >= 0 && Number.isFinite(Number(value))
      : [...field.options].some((option) => option.value === value);
    if (isKnown) { field.value = value; any = true; } else unknown.push(`${name}=${value}`);
  }
  const sentence = unknown.length ? `This page does not know ${unknown.join(", ")} of the address.` : "";
  return [any, sentence];
}

// -- The answer -------------------------------------------------------------------------------------

function chapterName(chapter) {
  const href = `${grid.chapters[chapter]}/index.html`;
  return element("a", { href, textContent: `chapter ${chapter}` });
}

function copied(label, text) {
  const button = element("button", { type: "button", textContent: "Copy" });
  // Lines break between words, and not after the hyphens of a flag.
  const words = text.split(" ").flatMap((textContent) => [element("span", { textContent }), " "]);
  const code = element("code", {}, ...words.slice(0, -1));
  button.setAttribute("aria-label", `Copy: ${label}`);
  button.onclick = async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      say("Copied.");
    } catch {
      getSelection().selectAllChildren(code);
      say("The text is selected. Copy it with your browser.");
    }
  };
  return element("div", { className: "copy" },
    element("div", { className: "copied" }, element("span", { textContent: label }), button),
    element("pre", { className: "command" }, code));
}

function say(text) {
  $("status").textContent = "";
  setTimeout(() => { $("status").textContent = text; });
}

const colour = (place) => `var(--part-${place})`;

function bar(choice, layout) {
  const whole = rates[choice.gpu].memory_gb, limit = whole * (1 - grid.spare);
  const sum = layout.parts.reduce((a, b) => a + b, 0), scale = 100 / Math.max(whole, sum);
  const named = grid.parts.map((name, place) => [name, layout.parts[place], colour(place)]).filter(([, gb]) => gb > 0);
  const words = named.map(([name, gb]) => `${name} ${number(gb, 1)} GB`).join(", ");
  const drawing = element("div", { className: "bar", role: "img" });
  drawing.setAttribute("aria-label", `Memory by formula: ${words}. Limit: ${number(limit, 1)} GB.`);
  let left = 0;
  for (const [, gb, background] of named) {
    const part = element("span");
    Object.assign(part.style, { left: `${left * scale}%`, width: `${gb * scale}%`, background });
    drawing.append(part);
    left += gb;
  }
  const edge = element("span", { className: "limit" });
  edge.style.left = `calc(${limit * scale}% - 1.5px)`;
  drawing.append(edge);
  const legend = element("ul", { className: "legend" });
  const swatch = (background, className = "") => {
    const made = element("i", { className });
    made.style.background = background;
    return made;
  };
  for (const [name, gb, background] of named)
    legend.append(element("li", {}, swatch(background), `${name}: ${number(gb, 1)} GB`));
  legend.append(element("li", {}, swatch("var(--fg)", "edge"), `limit: ${number(limit, 1)} of ${whole} GB`));
  return [drawing, legend];
}

function costs(choice, layout) {
  const tokens = Number($("tokens").value) * 1e9, price = $("price").value;
  if (!(tokens > 0)) return [["hours", "enter the tokens"], ["price", "enter the tokens"]];
  const hours = Math.ceil(tokens / choice.batch) * layout.step / 3600;
  const gpuHours = hours * choice.devices;
  const rows = [["hours", rounded(hours)], ["GPU hours", rounded(gpuHours)]];
  rows.push(["price", price === "" ? "enter your price" : rounded(gpuHours * Number(price))]);
  return rows;
}

function card(choice, layout, place) {
  const memory = [["GB per GPU, by formula", number(layout.gb)]];
  if (layout.tracedGb !== null) memory.push(["GB per GPU, traced", number(layout.tracedGb)]);
  const rows = [...memory, ["seconds a step", layout.step.toFixed(3)], ["efficiency", `${layout.efficiency.toFixed(1)} %`]];
  rows.push(...costs(choice, layout));
  rows.push(["samples × micro-batches", `${layout.samples} × ${layout.microBatches}`]);
  rows.push(["activation checkpointing", layout.checkpointing ? "yes" : "no"]);
  if (layout.bubble !== null) rows.push(["bubble", `${layout.bubble.toFixed(1)} %`]);
  const figures = element("dl", { className: "figures" });
  for (const [name, value] of rows)
    figures.append(element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
  const nodes = choice.devices > perNode ? "The command, once on each node" : "The command";
  return element("article", { className: "layout" },
    element("h3", {}, `${place + 1}. ${layout.name}, `, chapterName(layout.chapter)),
    figures, ...bar(choice, layout), copied(nodes, chapterCommand(choice, layout)));
}

function whyNot(answer) {
  if (!answer.out.length) return [];
  const rows = answer.out.map(({ name, chapter, problem }) => element("tr", {},
    element("td", { textContent: name }), element("td", { textContent: chapter }), element("td", { textContent: problem })));
  const head = ["layout", "chapter", "why not"].map((textContent) => element("th", { scope: "col", textContent }));
  const count = plural(answer.out.length, answer.best.length ? "other layout" : "layout");
  const verb = answer.out.length === 1 ? "does" : "do";
  const region = element("div", { className: "scroll", tabIndex: 0, role: "region" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  region.setAttribute("aria-label", "Layouts that do not fit");
  return [element("details", { open: !answer.best.length },
    element("summary", { textContent: `Why ${count} ${verb} not fit` }), region)];
}

// The guess beside the estimate, and what became of the guessed chapter.
function verdict(answer) {
  if (!guess) return [];
  const [chapter, gb] = guess, best = answer.best[0];
  const said = { "": "no guess", none: "nothing fits" };
  const rows = [["chapter", said[chapter] ?? chapter, best ? best.chapter : "nothing fits"]];
  const estimate = best ? best.tracedGb ?? best.gb : null;
  if (gb !== "" || best) rows.push(["GB per GPU", gb === "" ? "no guess" : gb, best ? number(estimate) : "too many"]);
  const body = rows.map(([name, ...values]) => element("tr", {}, element("th", { scope: "row", textContent: name }),
    ...values.map((value) => element("td", { textContent: value }))));
  const head = ["", "your guess", "estimate"].map((textContent) => element("th", { scope: "col", textContent }));
  const sentences = [];
  const own = Number(chapter);
  if (chapter === "none") sentences.push(best ? "There are layouts that fit." : "Your guess agrees: nothing fits.");
  else if (own && best && best.chapter === own) sentences.push("Your chapter is the estimate's first choice.");
  else if (own) {
    const place = answer.best.findIndex((layout) => layout.chapter === own);
    const failed = answer.out.filter((layout) => layout.chapter === own);
    if (place > 0) sentences.push(`Your chapter is number ${place + 1}.`);
    else if (failed.length) sentences.push(`Of chapter ${own}, ${failed[0].name} does not fit: ${failed[0].problem}.`);
    else if (best) sentences.push(`Chapter ${own} has no layout among the best three.`);
  }
  if (best && gb !== "" && Number(gb) > 0) {
    const ratio = Number(gb) / Math.max(estimate, 1);
    if (ratio > 1 / 1.15 && ratio < 1.15) sentences.push("Your guess of the memory is within 15 % of the estimate.");
    else sentences.push(ratio > 1 ? `Your guess of the memory is ${number(ratio, 1)} times the estimate.`
      : `The estimate is ${number(1 / ratio, 1)} times your guess of the memory.`);
  }
  return [element("div", { className: "verdict" },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)),
    ...sentences.map((textContent) => element("p", { textContent })))];
}

// The next number of GPUs in the grid that fits
function moreDevices(choice) {
  const limit = rates[choice.gpu].memory_gb * (1 - grid.spare);
  const next = axes.devices.filter((devices) => devices > choice.devices)
    .map((devices) => ({ ...choice, devices })).find((other) => lookUp(other).best.length);
  const nothing = element("p", {}, element("strong", { textContent: `No layout fits ${plural(choice.devices, "GPU")}.` }),
    ` Each GPU has ${number(limit, 1)} of ${rates[choice.gpu].memory_gb} GB for PyTorch.`);
  if (!next)
    return [nothing, element("p", { textContent: "No larger number of GPUs on this page fits, either." })];
  const { best } = lookUp(next);
  const button = element("button", { type: "button", className: "primary" });
  button.textContent = `Show ${plural(next.devices, "GPU")}`;
  button.onclick = () => { $("devices").value = next.devices; update(); focusResult(); };
  const words = `${plural(next.devices, "GPU")} are enough: ${best[0].name} (chapter ${best[0].chapter}), ` +
    `${best[0].tracedGb ?? best[0].gb} GB per GPU. The command below also prints chapter 3 with --cpu-offload, if this fits.`;
  return [nothing, element("p", { textContent: words }), element("p", {}, button)];
}

function answerTo(choice) {
  const answer = lookUp(choice);
  const title = element("h2", { id: "result-title", tabIndex: -1 });
  const again = element("button", { type: "button", id: "again", textContent: "Guess again" });
  again.onclick = guessAgain;
  const share = element("button", { type: "button", id: "share", textContent: "Copy the link" });
  share.onclick = async () => {
    try { await navigator.clipboard.writeText(location.href); say("The link is copied."); share.textContent = "Copied"; }
    catch { say("The address of this page is the link."); }
  };
  const buttons = element("div", { className: "buttons" }, again, share);
  if (answer.sentence) {
    title.textContent = "The tool refuses this choice";
    return [title, element("p", { textContent: `${answer.sentence}.` }),
      copied("The command that prints this", toolCommand(choice, false)), buttons];
  }
  const { best, more, traced } = answer;
  title.textContent = best.length
    ? `Estimate: ${best[0].name}, chapter ${best[0].chapter}` : "Estimate: nothing fits";
  const parts = [title, ...verdict(answer)];
  if (best.length) {
    const others = more ? ` ${plural(more, "slower layout")} ${more === 1 ? "fits" : "fit"}, too.` : "";
    parts.push(element("p", { textContent: (best.length > 1 ? `The best ${best.length === 3 ? "three" : "two"} layouts. ` +
      "Layouts within 5 % of the fastest count as equally fast, and the earliest chapter comes first." :
      "One layout fits.") + others }));
    parts.push(element("p", { className: "dim", textContent: traced
      ? "The memory of these layouts is also traced: the tool runs a step on tensors without memory."
      : "The memory is from the formula. It is not traced." }));
    parts.push(...best.map((layout, place) => card(choice, layout, place)));
  } else parts.push(...moreDevices(choice));
  parts.push(...whyNot(answer));
  parts.push(copied(traced ? "This command prints the same numbers (the trace takes a minute or more)"
    : "This command prints the same numbers", toolCommand(choice, traced)), buttons);
  return parts;
}

function summary() {
  const answer = lookUp(chosen());
  if (answer.sentence) return answer.sentence;
  if (!answer.best.length) return "Nothing fits.";
  const [first] = answer.best;
  return `First choice: ${first.name}, chapter ${first.chapter}, ${first.tracedGb ?? first.gb} GB per GPU, ` +
    `${first.step.toFixed(3)} seconds a step.`;
}

// -- Events -----------------------------------------------------------------------------------------

function updateLink() {
  const alone = Number($("devices").value) <= perNode;
  $("link").disabled = alone;
  $("link-note").textContent = alone ? "One node: no link between nodes." : "";
}

function update() {
  updateLink();
  if (!shown) return;
  history.replaceState(null, "", address());
  const opened = $("result").querySelector("details")?.open;
  $("result").replaceChildren(...answerTo(chosen()));
  const details = $("result").querySelector("details");
  if (details && opened) details.open = true;
  const text = summary();
  if ($("status").textContent !== text) say(text);
}

function focusResult() {
  const title = $("result-title");
  title.focus({ preventScroll: true });
  title.scrollIntoView({ block: "start" });
}

function show(withGuess) {
  $("note").textContent = "";
  guess = withGuess ? [$("guess-chapter").value, $("guess-gb").value] : null;
  shown = true;
  $("guess").hidden = true;
  $("result").hidden = false;
  update();
}

function guessAgain() {
  shown = false;
  guess = null;
  history.replaceState(null, "", location.pathname + location.search);
  $("result").hidden = true;
  $("guess").hidden = false;
  $("guess").reset();
  $("guess-chapter").focus();
}

function openAddress() {
  const [any, sentence] = readAddress();
  updateLink();
  if (any) show(false);
  if (!sentence) return;
  if (shown) $("result").prepend(element("p", { className: "verdict", textContent: sentence }));
  else $("note").textContent = sentence;
}

options($("model"), Object.entries(parameters).map(([name, billions]) =>
  [name, `${name.split("/")[1]}, ${number(billions, 1)}B`]));
options($("gpu"), Object.keys(axes.gpus).map((name) => [shortName(name), name]));
options($("devices"), axes.devices.map((count) => [count, number(count)]));
options($("link"), axes.links.map((rate) => [rate, `${number(rate)} Gbit/s`]));
options($("length"), axes.lengths.map((count) => [count, number(count)]));
options($("batch"), axes.batches.map((count) => [count, number(count)]));
options($("guess-chapter"), [["", "choose"], ...Object.entries(grid.techniques).map(([chapter, name]) =>
  [chapter, `${chapter}: ${name}`]), ["none", "nothing fits"]]);
for (const [name, value] of Object.entries({ ...DEFAULTS, ...NUMBERS })) $(name).value = value;
for (const name of [...CHOICES, ...Object.keys(NUMBERS)]) $(name).addEventListener("input", update);
$("choices").addEventListener("submit", (event) => event.preventDefault());
$("guess").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!$("guess-chapter").value && !$("guess-gb").value) {
    $("note").textContent = "Choose a chapter or enter GB, or skip the guess.";
    $("guess-chapter").focus();
    return;
  }
  show(true);
  focusResult();
});
$("skip").onclick = () => { show(false); focusResult(); };
addEventListener("hashchange", openAddress);
openAddress();
