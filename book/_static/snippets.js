// The search page has the texts of all pages with it, and asks for no page: a browser may not fetch one from the file system.
(() => {
  const ask = window.fetch.bind(window);
  window.fetch = (address, ...more) => {
    const path = decodeURIComponent(new URL(address, document.baseURI).pathname);
    const name = Object.keys(pageTexts).find((page) => path.endsWith(`/${page}.html`));
    return name ? Promise.resolve(new Response(pageTexts[name])) : ask(address, ...more);
  };
})();
