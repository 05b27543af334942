// Views that a reader moves, as book/analysis_book/figures/view.py writes them: fields give their values to the parameters of
// Vega, the address keeps them, and what they choose is said. Where the numbers are computed in the page, window.viewSources
// has a function for them, which is first called when a reader asks for more than stands there.
(() => {
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1] };
  // The address has a part for each view, which begins with its id; what stands before them is for all.
  const parts = () => {
    const found = { "": new URLSearchParams() };
    let id = "";
    for (const item of location.hash.slice(1).split("&")) {
      if (item.includes("=")) for (const pair of new URLSearchParams(item)) found[id].set(...pair);
      else found[(id = item)] ??= new URLSearchParams();
    }
    return found;
  };

  const begin = (figure) => {
    figure.classList.add("begun");
    const given = JSON.parse(figure.querySelector("script.given").textContent);
    // Views of one table share it.
    const table = (key) => JSON.parse(document.querySelector(`script.table[data-key="${key}"]`).textContent);
    const form = figure.querySelector("form"), said = figure.querySelector("output");
    const fields = Object.fromEntries([...form.elements].map((field) => [field.name, field])), [leading] = form.elements;
    const number = (name) => fields[name]?.type === "number";
    const valued = ({ name, value }) => [name, number(name) ? +value : value];
    const chosen = () => Object.fromEntries([...form.elements].map(valued));
    const compute = window.viewSources?.[given.source];
    let preview = {}, live = false, turn = 0;

    // What the chosen model does not have cannot be chosen; some numbers mean nothing in another model.
    const fit = (another = false) => {
      if (another) form.querySelectorAll("[type=text]").forEach((field) => (field.value = ""));
      for (const [name, allowed] of Object.entries(given.limits[leading.value] ?? {})) {
        const field = fields[name], [least, largest, first] = allowed;
        if (number(name)) {
          Object.assign(field, { min: least, max: largest });
          const wanted = another && first !== undefined ? first : Math.round(+field.value);
          field.value = Math.min(Math.max(wanted, least), largest);
        } else {
          for (const option of field.options) option.hidden = option.disabled = !allowed.includes(option.value);
          if (!allowed.includes(field.value)) field.value = allowed[0];
        }
      }
    };
    const make = async (state) => {
      const now = ++turn;
      if (now === 1) said.textContent = "Loading the model …";
      const made = await compute(state, given.about).catch((error) => (said.textContent = `No model: ${error}`, null));
      if (now !== turn || !made) return false;
      given.limits[leading.value] = made.limits;
      fit();
      for (const pair of Object.entries(made.rows)) for (const view of views) view.data(...pair);
      return true;
    };
    const show = async (more = {}) => {
      if (given.source && !live) more = {};
      preview = more;
      if (live && !(await make({ ...chosen(), ...more }))) return;
      for (const pair of Object.entries({ ...chosen(), ...more })) for (const view of views) view.signal(...pair);
      await Promise.all(views.map((view) => view.runAsync()));
      const sentences = given.said.map(([before, otherwise], place) => {
        const words = views[0].data(`said${place}`).map((row) => row.said).join("; ");
        return words ? `${before}${words}.` : otherwise && `${otherwise}.`;
      });
      said.textContent = sentences.filter(Boolean).join(" ");
    };
    const keep = (more = {}, another = false) => {
      for (const [name, value] of Object.entries(more)) fields[name].value = value;
      live ||= !!compute;
      fit(another);
      // A notebook's address is not ours.
      if (figure.closest(".jp-OutputArea, .output_area")) return show();
      const { "": _, [figure.id]: before, ...others } = parts();
      const kept = Object.entries({ ...others, [figure.id]: new URLSearchParams(chosen()) });
      const written = kept.filter(([, part]) => part.size).map(([id, part]) => `${id}&${part}`);
      history.replaceState(null, "", `#${written.join("&")}`);
      show();
    };
    const restore = () => {
      const whole = parts(), kept = whole[figure.id] ?? whole[""];
      const ours = Object.keys(fields).filter((name) => kept.has(name));
      if (location.hash && !ours.length) return; // Of a section, or of another view.
      form.reset();
      live ||= !!compute && ours.length > 0;
      for (const name of ours) {
        const value = kept.get(name), options = [...(fields[name].options ?? [{ value }])];
        const fits = number(name) ? isFinite(parseFloat(value)) : options.some((option) => option.value === value);
        if (fits) fields[name].value = value;
      }
      fit();
      show();
      if (Object.keys(whole).at(-1) === figure.id) figure.scrollIntoView();
    };
    // Of what is under the cursor, what the fields choose.
    const pointed = (item) => Object.fromEntries(Object.entries(item?.datum ?? {}).filter(([name]) => number(name)));
    const move = (event, ways) => {
      if (event.key === "Escape") show();
      if (event.key === "Enter") keep(preview);
      if (!STEPS[event.key]) return;
      event.preventDefault();
      const [way, step] = STEPS[event.key], field = fields[ways[way]];
      const wanted = (preview[field.name] ?? +field.value) + step;
      show({ ...preview, [field.name]: Math.min(Math.max(wanted, field.min), field.max) });
    };

    figure.querySelector(".live").hidden = false;
    form.hidden = !!given.source && !compute;
    const views = given.panels.map((spec, place) => {
      for (const data of spec.data) if (given.tables[data.name]) data.values = table(given.tables[data.name]);
      const panel = figure.querySelector(".panels").appendChild(document.createElement("div"));
      const view = new vega.View(vega.parse(spec), { renderer: "svg", container: panel, hover: true });
      // Of moves alone: where a link has scrolled the view under the cursor, nobody points at anything.
      view.addEventListener("mousemove", (_, item) => {
        const at = pointed(item);
        if (JSON.stringify(at) !== JSON.stringify(preview)) show(at);
      });
      panel.addEventListener("mouseleave", () => show());
      view.addEventListener("click", (_, item) => Object.keys(pointed(item)).length && keep(pointed(item)));
      const ways = given.moves[place], field = given.sweeps[place];
      if (field) view.addSignalListener("swept", (_, rows) => rows.includes(",") && keep({ [field]: rows }));
      if (ways) {
        const ariaLabel = `${spec.description}. Arrow keys move, Enter chooses.`;
        Object.assign(panel, { tabIndex: 0, role: "group", ariaLabel });
        panel.addEventListener("keydown", (event) => move(event, ways));
        panel.addEventListener("blur", () => show());
      }
      // A panel that nobody saw had no width.
      new ResizeObserver(() => dispatchEvent(new Event("resize"))).observe(panel);
      return view;
    });
    // A number that is being typed is none at first, nor is a list of them whole.
    form.oninput = ({ target }) => target.value !== "" && target.type !== "text" && keep({}, target === leading);
    form.onchange = () => keep();
    form.onsubmit = () => false;
    addEventListener("hashchange", restore);
    fit();
    show();
    if (location.hash) restore();
  };

  // The caption comes last: a figure without one is still being read.
  const look = () => document.querySelectorAll("figure.view:not(.begun):has(> figcaption)").forEach(begin);
  // A notebook adds figures when it likes.
  new MutationObserver(look).observe(document, { childList: true, subtree: true });
  addEventListener("DOMContentLoaded", look);
  look();
})();
