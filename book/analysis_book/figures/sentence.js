// What the view of a sentence shows (one_sentence.py), computed by the model in the page.
(() => {
  const weights = new URL("bert-weights.js", document.currentScript.src).href;
  const LISTED = 12, KEPT = 20;
  let loading;

  // By what of a sentence it is that passes through the model: the latest.
  const passes = new Map();
  const pass = (name, make) => {
    if (!passes.has(name)) passes.set(name, make());
    if (passes.size > KEPT) passes.delete(passes.keys().next().value);
    return passes.get(name);
  };

  // The changes of one layer. Of the mean, none: it is taken from hidden states that are measured, not from what is read.
  const CHANGES = {
    dimension: ({ dimension, hidden }, layer) => ({
      layer, read: (row) => row.map((value, i) => (i === dimension ? hidden[layer][i] : value)),
    }),
    query: ({ queries }, layer) => ({ layer, query: (row) => row.map((value, i) => value - queries[layer][i]) }),
    cls: ({ other }, layer, bert) => {
      const { hidden } = pass(other, () => bert.run(bert.encode(other)));
      return { layer, read: (row, token) => (token ? row : hidden[layer].subarray(0, bert.width)) };
    },
  };

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => sum(values) / values.length;

  // Of all pairs of two tokens, by the length of the sum of unit vectors.
  const averageCosine = (states, width, centre = new Float64Array(width)) => {
    const count = states.length / width, total = new Float64Array(width);
    for (let token = 0; token < count; token++) {
      const row = states.subarray(token * width, (token + 1) * width).map((value, i) => value - centre[i]);
      const length = Math.hypot(...row);
      row.forEach((value, i) => (total[i] += value / length));
    }
    return (sum(total.map((value) => value ** 2)) - count) / (count * (count - 1));
  };

  // Of a layer, means over its heads and queries: the weight of the first key, and the entropy of rows over its largest.
  const ofLayer = (heads) => {
    const rows = heads.flat(), entropy = (row) => -sum(row.map((weight) => (weight ? weight * Math.log(weight) : 0)));
    return { cls: mean(rows.map(([first]) => first)), entropy: mean(rows.map(entropy)) / Math.log(rows[0].length) };
  };

  const rowsOf = (bert, about, state) => {
    const { change, sentence } = state, layer = state.layer - 1, head = state.head - 1, { width } = bert;
    const ids = bert.encode(sentence), count = ids.length, changed = change !== "nothing";
    const [query, key] = [state.query, state.key].map((number) => Math.min(number, count) - 1);
    const plain = pass(sentence, () => bert.run(ids));
    const now = change in CHANGES
      ? pass([change, layer, sentence].join(" "), () => bert.run(ids, CHANGES[change](about, layer, bert)))
      : plain;
    const tokens = ids.map((id, i) => ({ number: i + 1, token: `${i + 1} ${bert.vocabulary[id]}` }));
    const named = (i) => tokens[i].token, row = now.layers[layer].weights[head];
    const attention = row.flatMap((weights, i) => weights.map((weight, j) => (
      { query: i + 1, key: j + 1, from: named(i), to: named(j), weight })));
    const heads = now.layers.flatMap(({ weights }, l) => weights.map((rows, h) => (
      { layer: l + 1, head: h + 1, weight: mean(rows.map((weights) => weights[key])) })));
    const scores = bert.contributions(now.layers[layer], layer, head, query, key);
    const contributions = scores.map((contribution, dimension) => ({ dimension, contribution }))
      .sort((a, b) => Math.abs(b.contribution) - Math.abs(a.contribution)).slice(0, LISTED)
      .map((row, i) => ({ ...row, rank: i + 1 }));
    const pair = [{ query: named(query), key: named(key), weight: row[query][key], score: sum(scores) }];

    const ofSentence = { nothing: plain, [change]: now }, measured = changed ? ["nothing", change] : ["nothing"];
    const cosines = [], beside = [];
    for (const state of measured) {
      const { hidden, layers } = ofSentence[state], of = ofLayer(layers[layer].weights);
      const cosine = hidden.map((states, l) => averageCosine(states, width, state === "mean" ? about.hidden[l] : undefined));
      const first = ofLayer(plain.layers[layer].weights).cls, lost = state in CHANGES ? 1 - of.cls / first : undefined;
      const numbers = { cls: of.cls, lost, entropy: of.entropy, cosine: cosine[layer + 1] };
      cosine.forEach((value, l) => cosines.push({ hidden: l, of: about.ours, state, value }));
      for (const [quantity, value] of Object.entries(numbers))
        if (value !== undefined) beside.push({ quantity, of: about.ours, state, value });
      for (const known of about.corpus) {
        const { quantity, hidden: at, value, low, high } = known, number = { of: about.theirs, state, value, low, high };
        if (known.state !== state || (known.layer && known.layer !== layer + 1)) continue;
        if (quantity === "cosine") cosines.push({ hidden: at, ...number });
        if (quantity !== "cosine" || at === layer + 1) beside.push({ quantity, ...number });
      }
    }
    const limits = { layer: [1, bert.layers], head: [1, bert.heads], query: [1, count], key: [1, count] };
    return { rows: { tokens, attention, heads, contributions, pair, cosines, beside }, limits };
  };

  window.viewSources ??= {};
  window.viewSources.sentence = async (state, about) => {
    loading ??= Bert.load(weights);
    return rowsOf(await loading, about, state);
  };
})();
