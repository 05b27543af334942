// The claims ledger: fields above it choose which claims are shown.
document.addEventListener("DOMContentLoaded", () => {
  const claims = [...document.querySelectorAll(".verdicts.ledger details.claim")];
  if (!claims.length) return;
  const chips = (claim) => [...claim.querySelectorAll(".chip")].map((chip) => chip.textContent);
  const form = Object.assign(document.createElement("form"), { className: "ledger-filter" });
  const words = Object.assign(document.createElement("input"), { type: "search", placeholder: "such as entropy" });
  const verdict = document.createElement("select"), model = document.createElement("select");
  const options = (field, values) => field.append(...["", ...new Set(values)].map((v) => new Option(v || "any", v)));
  const parts = claims.flatMap(chips).map((text) => text.split(": "));
  options(verdict, parts.map((part) => part.at(-1)));
  options(model, parts.filter((part) => part.length > 1).map((part) => part[0].split(", ")[0]));
  const count = Object.assign(document.createElement("output"), { ariaLive: "polite" });
  for (const [name, field] of [["Claims that mention", words], ["with the verdict", verdict], ["judged on", model]]) {
    const label = document.createElement("label");
    label.append(`${name} `, field);
    form.append(label);
  }
  form.append(count);
  document.querySelector(".verdicts.ledger").parentElement.querySelector("h2").before(form);
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/);
    for (const claim of claims) {
      const fits = chips(claim).some((chip) => chip.startsWith(model.value) && chip.endsWith(verdict.value));
      claim.hidden = !(fits && wanted.every((word) => claim.textContent.toLowerCase().includes(word)));
    }
    count.textContent = `${claims.filter((claim) => !claim.hidden).length} of ${claims.length} claims shown`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
});
