// A browser shows a file of the file system rather than download it, and may not read it either.
// A script it may: so each executed notebook also lies beside itself as a call of saveNotebook.
window.saveNotebook = (name, text) => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/x-ipynb+json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

document.addEventListener("click", (event) => {
  const link = event.target.closest('a.btn-download-source-button[href$=".ipynb"]');
  if (!link) return;
  event.preventDefault();
  const script = document.createElement("script");
  script.src = `${link.href}.js`;
  document.head.append(script);
});
