// The second button of a code cell, which book/_ext/copying.py adds with the script that it copies. ClipboardJS comes
// with sphinx-copybutton, and needs neither a network nor a secure origin.
window.addEventListener("load", () => {
  // A script that reads a table of this site has its whole address.
  const text = ({ dataset: { script, table } }) =>
    table ? script.replaceAll(`"${table}"`, `"${new URL(table, document.baseURI)}"`) : script;
  const clipboard = new ClipboardJS("button.copy-everything", { text });
  const answer = (words) => (event) => {
    const button = event.trigger;
    const label = button.getAttribute("aria-label");
    button.focus(); // ClipboardJS moves the focus.
    button.dataset.tooltip = words;
    button.classList.add("success");
    button.insertAdjacentHTML("beforeend", `<span class="visually-hidden" role="status">${words}</span>`);
    setTimeout(() => {
      button.dataset.tooltip = label;
      button.classList.remove("success");
      button.querySelector("span").remove();
    }, 2000);
  };
  clipboard.on("success", answer("Copied!"));
  clipboard.on("error", answer("Failed to copy"));
});
