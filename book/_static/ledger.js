// The claims ledger: fields above it choose which claims are shown and in which order, the address keeps them, and a link to
// a claim opens it.
document.addEventListener("DOMContentLoaded", () => {
  const claims = [...document.querySelectorAll(".verdicts.ledger details.claim")];
  if (!claims.length) return;
  const chips = (claim, scope) => [...claim.querySelectorAll(`${scope} .chip`)].map((chip) => chip.textContent);
  // A chip has all that a verdict was reached on, as in "MiniLM; MPNet: holds".
  const split = (text) => {
    const [names, verdict] = text.includes(": ") ? text.split(": ") : ["", text];
    return { names: names.split("; "), verdict };
  };
  const judged = claims.flatMap((claim) => chips(claim, ".scope").filter((text) => !text.startsWith("not run")).map(split));
  const form = Object.assign(document.createElement("form"), { className: "ledger-filter" });
  const count = Object.assign(document.createElement("output"), { ariaLive: "polite" });
  const sorted = (values) => [...new Set(values)].sort();
  const choice = (pairs) => {
    const field = document.createElement("select");
    field.append(...pairs.map(([value, text]) => new Option(text, value)));
    return field;
  };
  const any = (values) => choice([["", "any"], ...sorted(values).map((value) => [value, value])]);
  const fields = {
    words: Object.assign(document.createElement("input"), { type: "search", placeholder: "such as entropy" }),
    scope: choice([["", "any"], [".paper", "the paper’s own setting"], [".elsewhere", "other models or texts"], [".ours", "claims of our own"]]),
    verdict: any(judged.map((chip) => chip.verdict)),
    model: any(judged.flatMap((chip) => chip.names.map((name) => name.split(", ")[0])).filter(Boolean)),
    order: choice([["", "papers"], ["book", "pages of the book"]]),
  };
  const names = ["Claims that mention", "column", "with the verdict", "judged on", "in the order of the"];
  Object.values(fields).forEach((field, place) => {
    const label = document.createElement("label");
    label.append(`${names[place]} `, field);
    form.append(label);
  });
  form.append(count);
  document.querySelector(".verdicts.ledger").parentElement.querySelector("h2").before(form);

  const show = () => {
    const { words, scope, verdict, model, order } = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));
    const wanted = words.toLowerCase().split(/\s+/);
    claims.forEach((claim, place) => {
      const is = (chip) => (!verdict || chip.verdict === verdict) && chip.names.some((name) => name.startsWith(model));
      const fits = chips(claim, scope || ".scope").map(split).some(is);
      claim.hidden = !(fits && wanted.every((word) => claim.textContent.toLowerCase().includes(word)));
      claim.dataset.place = place;
    });
    const rank = (claim) => [order ? +claim.dataset.page : 0, +claim.dataset.place];
    for (const block of document.querySelectorAll(".verdicts.ledger")) {
      const mine = [...block.querySelectorAll("details.claim")];
      mine.sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
      block.append(...mine);
    }
    count.textContent = `${claims.filter((claim) => !claim.hidden).length} of ${claims.length} claims shown`;
  };
  // A claim by its name alone, fields by name and value.
  const address = () => new URLSearchParams(location.hash.slice(1));
  const keep = () => {
    const kept = new URLSearchParams();
    for (const [name, field] of Object.entries(fields)) if (field.value) kept.set(name, field.value);
    history.replaceState(null, "", `#${kept}`);
    show();
  };
  const restore = () => {
    const given = address();
    for (const [name, field] of Object.entries(fields)) {
      const value = given.get(name) ?? "";
      if (!field.options || [...field.options].some((option) => option.value === value)) field.value = value;
    }
    const claim = claims.find((one) => given.has(one.id));
    show();
    if (!claim) return;
    claim.hidden = false;
    claim.open = true;
    claim.scrollIntoView();
    claim.querySelector("summary").focus({ preventScroll: true });
  };
  form.addEventListener("input", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", restore);
  // The theme scrolls once its own scripts have run.
  restore();
  addEventListener("load", restore, { once: true });
});
