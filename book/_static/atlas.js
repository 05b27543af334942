// The atlas: a type, a model's name or its config.json gives a card; a convention shows the types that share it; a head puts
// the table in order. The address keeps the type, or the convention.
document.addEventListener("DOMContentLoaded", () => {
  const atlas = document.querySelector(".atlas");
  if (!atlas) return;
  const { version, before, facts, texts, values, traps, types, failed } = JSON.parse(atlas.querySelector(".atlas-data").textContent);
  const form = atlas.querySelector("form"), card = atlas.querySelector(".atlas-card");
  const table = document.querySelector(".atlas-types table"), body = table.tBodies[0];
  const make = (tag, properties = {}, ...inside) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...inside);
    return made;
  };

  // --- Which type ----------------------------------------------------------------------------------------------------------
  const letters = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
  const names = [...Object.keys(types), ...Object.keys(failed)];
  const candidates = (text) => {
    const typed = text.trim();
    if (names.includes(typed)) return [typed];
    // An owner is no part of a model's name.
    const wanted = letters(typed.split("/").at(-1));
    if (!wanted) return [];
    const inside = names.filter((name) => wanted.includes(letters(name)) && letters(name).length > 1);
    const around = names.filter((name) => wanted.length > 2 && letters(name).includes(wanted));
    inside.sort((a, b) => letters(b).length - letters(a).length || (a in types ? -1 : 1));
    around.sort((a, b) => a.length - b.length);
    return [...new Set([...inside, ...around])];
  };

  // --- The card ------------------------------------------------------------------------------------------------------------
  const code = (number, model) => make("pre", { tabIndex: 0 }, make("code", {}, texts[number].replaceAll('"MODEL"', JSON.stringify(model))));
  const link = (name) => make("a", { href: `#${name}` }, name);
  const rows = (cells, earlier) => facts.flatMap(([name, label, expected, surprising], place) => {
    const words = texts[cells[place]], differs = surprising.includes(cells[place]);
    if (!words || words === "no text") return [];
    const given = make("td", { className: differs ? "differs" : "" }, differs ? "≠ " : "", words);
    if (name in earlier) given.append(make("small", {}, ` (${before}: ${texts[earlier[name]] || "nothing"})`));
    return [make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, expected), given)];
  });
  const draw = (name, model = name, others = []) => {
    const { made, reads, cells, earlier, traps: caught, plain, measured } = types[name] ?? {};
    const head = make("h2", {}, make("code", {}, name));
    const more = others.length ? [make("p", {}, "Not this one? ", ...others.slice(0, 6).flatMap((other) => [link(other), " "]))] : [];
    if (!made) {
      card.replaceChildren(head, make("p", {}, `No small model of it runs: ${failed[name]}`), ...more);
      return;
    }
    head.append(`: ${made}, reads ${reads}`);
    const heads = ["", "you might expect", "you get"].map((word) => make("th", { scope: "col" }, word));
    const warnings = caught.map((trap) => make("li", {}, make("a", { href: `#trap-${trap}` }, traps[trap].replaceAll("`", ""))));
    const parts = [head, ...more];
    parts.push(warnings.length ? make("ul", { className: "traps" }, ...warnings) : make("p", {}, "Nothing here would surprise you."));
    const list = make("table", { className: "table" }, make("caption", {}, `A small random ${name}, in transformers ${version}.`));
    list.append(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows(cells, earlier)));
    parts.push(make("div", { className: "pst-scrollable-table-container", tabIndex: 0, role: "region", ariaLabel: "Facts" }, list));
    parts.push(make("p", {}, "With transformers alone:"), code(plain, model));
    if (texts[measured]) parts.push(make("p", {}, "With this library:"), code(measured, model));
    else parts.push(make("p", {}, "This library does not measure it, or it was not tried."));
    card.replaceChildren(...parts);
  };
  const unknown = (words) => card.replaceChildren(make("p", {}, words));

  // --- The table -----------------------------------------------------------------------------------------------------------
  const shown = make("output", { ariaLive: "polite" });
  table.parentElement.before(shown);
  const place = Object.fromEntries(facts.map(([name], number) => [name, number]));
  const says = (number) => values[number] ?? [texts[number]];
  const filter = (column, value) => {
    let count = 0;
    for (const row of body.rows) {
      const cells = types[row.id].cells;
      row.hidden = column !== undefined && !says(cells[place[column]]).includes(value);
      count += !row.hidden;
    }
    const words = column === undefined ? [] : [` with “${facts[place[column]][1]}: ${value}”. `, make("a", { href: "#" }, "Show all")];
    shown.replaceChildren(`${count} types`, ...words);
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = make("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.ariaSort === "ascending";
      for (const other of table.tHead.rows[0].cells) other.ariaSort = null;
      head.ariaSort = down ? "descending" : "ascending";
      const text = (row) => row.cells[column].textContent;
      const order = [...body.rows].sort((a, b) => text(a).localeCompare(text(b), "en", { numeric: true }));
      body.append(...(down ? order.reverse() : order));
    });
  });

  // --- The address ---------------------------------------------------------------------------------------------------------
  const restore = () => {
    const wanted = decodeURIComponent(location.hash.slice(1).replaceAll("+", " "));
    const [column, value] = wanted.split(/=(.*)/);
    if (names.includes(wanted)) {
      form.model.value = wanted;
      draw(wanted);
      card.scrollIntoView();
    } else if (value !== undefined && column in place) {
      filter(column, value);
      table.parentElement.scrollIntoView();
      return;
    }
    filter();
  };
  const choose = (text) => {
    const [name, ...others] = candidates(text);
    if (!name) return unknown(text.trim() ? `No type is known by the name of ${text.trim()}: drop its config.json, which says it.` : "");
    history.replaceState(null, "", `#${name}`);
    draw(name, text.includes("/") ? text.trim() : name, others);
  };
  form.addEventListener("submit", (event) => event.preventDefault());
  form.model.addEventListener("input", () => choose(form.model.value));
  const read = async (file) => {
    try {
      const { model_type, _name_or_path } = JSON.parse(await file.text());
      if (!names.includes(model_type)) return unknown(`The configuration is of type ${model_type}, which transformers ${version} does not know.`);
      history.replaceState(null, "", `#${model_type}`);
      form.model.value = model_type;
      draw(model_type, _name_or_path || model_type);
    } catch {
      unknown(`${file.name} is no configuration: give the config.json of a model.`);
    }
  };
  form.config.addEventListener("change", () => {
    const [file] = form.config.files;
    // The same file, once it is mended, is a change again.
    form.config.value = "";
    if (file) read(file);
  });
  atlas.addEventListener("dragover", (event) => event.preventDefault());
  atlas.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) read(event.dataTransfer.files[0]);
  });
  form.hidden = false;
  addEventListener("hashchange", restore);
  // The browser scrolls to the row of a type once the page is loaded.
  restore();
  addEventListener("load", restore, { once: true });
});
